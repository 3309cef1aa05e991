// Runs as a client sees them: frames in, state out. Pure and total.
//
// The same frame twice, a replay over live frames, or frames of any other type never change
// the picture: a chunk counts once by (tool call id, run id, sequence), and is only marked as
// seen when its run is known. The first terminal frame of a run stands. A run that was cleared
// is forgotten and may begin anew. Whatever changes nothing returns the very state object that
// came in, so a view can compare by identity.

import { applyChunkToParts, isPartChunk } from "./parts.js";

export { applyChunkToParts, isPartChunk } from "./parts.js";

const PROGRESS = "data-agent-progress";
const MILESTONE = "data-agent-milestone";

/** Ids are any text, `__proto__` included, so tables have no prototype. */
const table = (...from) => Object.assign(Object.create(null), ...from);

/**
 * `runsById`, `runsByToolCallId` and `unboundRuns` are for readers; `asked` (run id to the calls
 * that it and all below it wait for), `seen` (run id to what was taken of it: sequences as
 * ranges, names of reports) and `protocolErrors` (a second, different end of a run) are
 * bookkeeping.
 */
export function emptyState() {
  return {
    runsById: table(),
    runsByToolCallId: table(),
    unboundRuns: [],
    asked: table(),
    seen: table(),
    protocolErrors: 0,
  };
}

/** Compares by code points; `<` would compare UTF-16 halves. */
export function byCodePoints(a, b) {
  const [left, right] = [Array.from(a), Array.from(b)];
  const shared = Math.min(left.length, right.length);
  for (let at = 0; at < shared; at += 1) {
    if (left[at] !== right[at]) return left[at].codePointAt(0) - right[at].codePointAt(0);
  }
  return left.length - right.length;
}

export function siblingOrder(a, b) {
  return a.order - b.order || byCodePoints(a.runId, b.runId);
}

// ------------------------------------------------------------- numbers already taken

function holds(ranges, number) {
  return ranges.some(([first, last]) => first <= number && number <= last);
}

/** `ranges` (closed, sorted, never touching) with `number` put in. */
function withNumber(ranges, number) {
  const next = [];
  let [first, last] = [number, number];
  for (const range of ranges) {
    if (range[1] < first - 1 || range[0] > last + 1) next.push(range);
    else [first, last] = [Math.min(first, range[0]), Math.max(last, range[1])];
  }
  next.push([first, last]);
  return next.sort((a, b) => a[0] - b[0]);
}

// ------------------------------------------------------------------------ one new state

/** A run without a tool call, or with an empty id of one, is unbound. */
const callOf = (run) => run.parentToolCallId || null;

/** A state in the making: tables are copied when they are first written to, not per frame. */
class Draft {
  #from;
  #next = null;
  #moved = new Map(); // call to whether its list has to be made anew, or one run replaced

  constructor(state) {
    this.#from = state;
  }

  get #state() {
    return this.#next ?? this.#from;
  }

  /** The new state; a table that is named is a copy that may be written to. */
  #writable(name) {
    this.#next ??= { ...this.#from };
    if (name !== undefined && this.#next[name] === this.#from[name]) {
      this.#next[name] = table(this.#from[name]);
    }
    return this.#next;
  }

  run(runId) {
    return this.#state.runsById[runId];
  }

  put(run) {
    const before = this.run(run.runId);
    const same = before && callOf(before) === callOf(run) && before.order === run.order;
    this.#writable("runsById").runsById[run.runId] = run;
    for (const call of new Set([callOf(before ?? run), callOf(run)])) {
      this.#moved.set(call, !same || (this.#moved.get(call) ?? false));
    }
  }

  drop(runIds) {
    for (const runId of runIds) {
      const run = typeof runId === "string" ? this.run(runId) : undefined;
      if (run === undefined) continue;
      this.#moved.set(callOf(run), true);
      delete this.#writable("runsById").runsById[runId];
      delete this.#writable("seen").seen[runId];
      this.asks(runId, []);
    }
  }

  asks(runId, calls) {
    if (calls.length > 0) this.#writable("asked").asked[runId] = calls;
    else if (runId in this.#state.asked) delete this.#writable("asked").asked[runId];
  }

  seen(runId, call) {
    return this.#state.seen[runId]?.[call] ?? NOTHING_SEEN;
  }

  see(runId, call, what) {
    const { seen } = this.#writable("seen");
    seen[runId] = table(seen[runId], { [call]: what });
  }

  wrong() {
    this.#writable().protocolErrors += 1;
  }

  finish() {
    if (this.#moved.size > 0) this.#index();
    return this.#state;
  }

  #index() {
    const next = this.#next;
    const lists = new Map();
    for (const [call, anew] of this.#moved) {
      const old = (call === null ? next.unboundRuns : next.runsByToolCallId[call]) ?? [];
      lists.set(call, anew ? [] : old.map(({ runId }) => next.runsById[runId]));
    }
    if ([...this.#moved.values()].includes(true)) {
      for (const run of Object.values(next.runsById)) {
        if (this.#moved.get(callOf(run))) lists.get(callOf(run)).push(run);
      }
    }
    const byCall = table(next.runsByToolCallId);
    for (const [call, runs] of lists) {
      if (this.#moved.get(call)) runs.sort(siblingOrder);
      if (call === null) next.unboundRuns = runs;
      else if (runs.length > 0) byCall[call] = runs;
      else delete byCall[call];
    }
    next.runsByToolCallId = byCall;
  }
}

const NOTHING_SEEN = { ranges: [], names: new Set() };

// ----------------------------------------------------------------------- run changes

function sameMembers(a, b) {
  const names = Object.keys(a);
  const equal = (x, y) => x === y || JSON.stringify(x) === JSON.stringify(y);
  return names.length === Object.keys(b).length && names.every((name) => equal(a[name], b[name]));
}

function started(draft, frame, event) {
  const before = draft.run(event.runId);
  if (typeof event.agentType !== "string" || (before && before.status !== "running")) return;
  const run = {
    runId: event.runId,
    agentType: event.agentType,
    order: typeof event.order === "number" ? event.order : 0,
    status: "running",
    parts: before?.parts ?? [],
    subAgent: { agent: event.agentType, name: event.runId },
  };
  const call = frame.parentToolCallId;
  if (typeof call === "string") run.parentToolCallId = call;
  for (const name of ["inputPreview", "display"]) if (name in event) run[name] = event[name];
  for (const name of ["progress", "milestones"]) if (before?.[name]) run[name] = before[name];
  if (!before || !sameMembers(before, run)) draft.put(run);
}

const PROGRESS_FIELDS = { fraction: "number", message: "string", phase: "string", at: "number" };

/** Fields of a wrong type are dropped; `data` may be anything, `at` is the sender's clock. */
function progressOf(data) {
  const progress = {};
  for (const [name, type] of Object.entries(PROGRESS_FIELDS)) {
    if (typeof data?.[name] === type) progress[name] = data[name];
  }
  if (data?.data !== undefined) progress.data = data.data;
  return progress;
}

function withMilestone(run, data) {
  if (typeof data?.name !== "string") return run;
  const number = (value) => (typeof value === "number" ? value : 0);
  const reached = { name: data.name, sequence: number(data.sequence), at: number(data.at) };
  if (data.data !== undefined) reached.data = data.data;
  const known = run.milestones ?? [];
  if (known.some((old) => old.sequence === reached.sequence)) return run;
  const next = { ...run };
  next.milestones = [...known, reached].sort((a, b) => a.sequence - b.sequence);
  if (run.progress && reached.at < (run.progress.at ?? 0)) return next;
  const { data: _, ...progress } = progressOf(data);
  next.progress = { ...progress, milestone: reached.name, at: reached.at };
  return next;
}

function withChunk(run, body) {
  if (body.type === PROGRESS) return { ...run, progress: progressOf(body.data) };
  const next = body.type === MILESTONE ? withMilestone(run, body.data) : run;
  if (body.type === MILESTONE && next === run) return run;
  const parts = applyChunkToParts(run.parts, body);
  return parts === run.parts ? next : { ...next, parts };
}

function parsed(text) {
  try {
    const body = JSON.parse(text);
    return body !== null && typeof body === "object" && !Array.isArray(body) ? body : null;
  } catch {
    return null;
  }
}

/** What makes a frame the same frame again: its sequence, or the name of a report. */
function identityOf(frame, event, body) {
  if (event.unstoredId !== undefined) return `unstored ${JSON.stringify(event.unstoredId)}`;
  if (body.type === MILESTONE && typeof body.data?.name === "string") {
    return `milestone ${typeof body.data.sequence === "number" ? body.data.sequence : 0}`;
  }
  if (body.type !== PROGRESS) return frame.sequence;
  return `progress ${typeof body.id === "string" ? body.id : `${frame.sequence} ${event.body}`}`;
}

function chunk(draft, frame, event) {
  const before = draft.run(event.runId);
  const body = before && Number.isInteger(frame.sequence) ? parsed(event.body) : null;
  if (body === null || !isPartChunk(body)) return;
  const call = frame.parentToolCallId ?? "";
  const { ranges, names } = draft.seen(event.runId, call);
  const identity = identityOf(frame, event, body);
  const named = typeof identity === "string";
  if (named ? names.has(identity) : holds(ranges, identity)) return;
  // Seen also where it does nothing: come again later, it might find a part to change.
  const now = named
    ? { ranges, names: new Set(names).add(identity) }
    : { ranges: withNumber(ranges, identity), names };
  draft.see(event.runId, call, now);
  const run = withChunk(before, body);
  if (run !== before) draft.put(run);
  if (body.type === PROGRESS && run.status === "running") asked(draft, run.runId, body.data);
}

/** Only these two reports say what a run waits for; all its others say nothing about that. */
function asked(draft, runId, { phase, data } = {}) {
  const calls = Array.isArray(data?.calls) ? data.calls : [];
  const named = (call) => typeof call?.runId === "string" && typeof call.toolCallId === "string";
  if (phase === "waiting") draft.asks(runId, calls.filter(named));
  if (phase === "answered") draft.asks(runId, []);
}

const ENDS = {
  finished: (event) => ({ status: "completed", summary: event.summary }),
  error: (event) => ({ status: "error", error: event.error }),
  aborted: (event) => ({ status: "aborted", error: event.reason }),
  interrupted: (event) => ({
    status: "interrupted",
    error: event.error,
    reason: event.reason,
    childStillRunning: event.childStillRunning,
  }),
};

function ended(draft, event) {
  const before = draft.run(event.runId);
  if (!before) return;
  const run = { ...before };
  for (const [name, value] of Object.entries(ENDS[event.kind](event))) {
    if (value !== undefined) run[name] = value;
  }
  if (before.status === "running") {
    draft.put(run);
    draft.asks(run.runId, []);
  } else if (before.status !== run.status) draft.wrong();
}

function apply(draft, frame) {
  const event = frame?.type === "agent-tool-event" ? frame.event : null;
  if (event === null || typeof event !== "object") return;
  if (event.kind === "cleared" && Array.isArray(event.runIds)) draft.drop(event.runIds);
  if (typeof event.runId !== "string") return;
  if (event.kind === "started") started(draft, frame, event);
  else if (event.kind === "chunk") chunk(draft, frame, event);
  else if (Object.hasOwn(ENDS, event.kind)) ended(draft, event);
}

/** The state after `frames`, in their order; `state` itself when they change nothing. */
export function applyAgentToolEvents(state, frames) {
  const draft = new Draft(state);
  for (const frame of frames) apply(draft, frame);
  return draft.finish();
}

/** The state after `frame`; `state` itself when the frame changes nothing. */
export function applyAgentToolEvent(state, frame) {
  return applyAgentToolEvents(state, [frame]);
}

/**
 * The calls that runs wait for, their own and those of all below them, each once and with the
 * `runId` of the run that asks.
 */
export function callsOfRuns(state) {
  const found = new Map();
  for (const call of Object.values(state.asked).flat()) {
    const key = JSON.stringify([call.runId, call.toolCallId]);
    if (!found.has(key)) found.set(key, call);
  }
  return [...found.values()];
}

/** The runs that one tool call dispatched, in their stable order. */
export function runsOf(state, toolCallId) {
  return state.runsByToolCallId[toolCallId] ?? [];
}
