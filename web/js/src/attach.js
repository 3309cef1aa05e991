// What a client that comes back says it has of an agent's runs, in its address: a list of
// [run id, when it was asked for, the last frame of those that came without a gap]. The
// server then sends the rest. It only saves bytes; who says nothing gets everything.

export const PARAMETER = "_runs";
const MOST = 64; // runs that one address tells of, the newest
const CHARS = 4_096; // of its text: addresses have to pass through proxies

/** Notes one frame of a run in `known`, a Map of run id to `[startedAt, sequence]`. */
export function noted(known, { event, sequence, startedAt }) {
  if (event?.kind === "cleared") {
    for (const runId of Array.isArray(event.runIds) ? event.runIds : []) known.delete(runId);
    return;
  }
  if (typeof event?.runId !== "string") return;
  const had = known.get(event.runId);
  if (event.kind === "started") {
    if (!Number.isInteger(startedAt) || had?.[0] === startedAt) return;
    known.delete(event.runId); // the newest stand last
    known.set(event.runId, [startedAt, 0]);
    if (known.size > MOST) known.delete(known.keys().next().value);
  } else if (had !== undefined && sequence === had[1] + 1) {
    known.set(event.runId, [had[0], sequence]);
  }
}

/** The parameter's text for the newest of these; null when there is nothing to say. */
export function knownText(known) {
  const said = [];
  let size = 2;
  for (const [runId, [startedAt, sequence]] of [...known].reverse()) {
    const entry = [runId, startedAt, sequence];
    size += new TextEncoder().encode(JSON.stringify(entry)).length + 1;
    if (size > CHARS) break;
    said.push(entry);
  }
  return said.length > 0 ? JSON.stringify(said) : null;
}
