// Message parts from UI chunks. Pure: a call returns a new list, or the very list it was
// given when the chunk changes nothing. Never throws on what a wire may bring.
//
// A text delta goes to the last part of its type, whatever its id says: servers never
// interleave two open text parts. A tool part is found by its toolCallId, only moves
// forward, and once it has an end, that end stays (its output may be refined).

const SETTLED = ["output-available", "output-error", "output-denied"];
const APPROVALS = ["approval-requested", "approval-responded"];

/**
 * What is known of a tool part besides what it shows: `raw`, its input text so far, and
 * `provisional`, that its input was read from such text and the real one may still come.
 * A part that is replaced hands this on.
 */
const sides = new WeakMap();

function lastIndex(parts, test) {
  for (let at = parts.length - 1; at >= 0; at -= 1) if (test(parts[at])) return at;
  return -1;
}

function replaced(parts, at, part) {
  const next = parts.slice();
  next[at] = part;
  return next;
}

/** The members of `from` that are there, under the names that a part uses. */
function present(from, names) {
  const found = {};
  for (const [key, as] of names) if (from[key] != null) found[as] = from[key];
  return found;
}

const TOOL_EXTRAS = [
  ["providerExecuted", "providerExecuted"],
  ["providerMetadata", "callProviderMetadata"],
  ["title", "title"],
];

/** Tool input is always an object: JSON text of one is read, anything else is empty. */
function asInput(input) {
  let value = input;
  if (typeof value === "string") {
    try {
      value = JSON.parse(value);
    } catch {
      value = null;
    }
  }
  return value !== null && typeof value === "object" && !Array.isArray(value) ? value : {};
}

// ---------------------------------------------------------------- text and reasoning

function withMetadata(part, metadata) {
  if (metadata == null || part.type !== "reasoning") return part;
  return { ...part, providerMetadata: { ...part.providerMetadata, ...metadata } };
}

const begin = (type) => (parts) => [...parts, { type, text: "", state: "streaming" }];

const extend = (type) => (parts, chunk) => {
  const delta = typeof chunk.delta === "string" ? chunk.delta : "";
  const at = lastIndex(parts, (part) => part.type === type);
  const part = at < 0 ? { type, text: "", state: "streaming" } : parts[at];
  const longer = withMetadata({ ...part, text: part.text + delta }, chunk.providerMetadata);
  return at < 0 ? [...parts, longer] : replaced(parts, at, longer);
};

const finish = (type) => (parts, chunk) => {
  const at = lastIndex(parts, (part) => part.type === type);
  if (at < 0) return parts;
  const done = { ...parts[at], state: "done" };
  return replaced(parts, at, withMetadata(done, chunk.providerMetadata));
};

// ------------------------------------------------------------------------------ tools

function newTool(chunk, state, members) {
  return {
    type: `tool-${chunk.toolName}`,
    toolCallId: chunk.toolCallId,
    toolName: chunk.toolName,
    state,
    ...members,
    ...present(chunk, TOOL_EXTRAS),
  };
}

/**
 * Changes the tool part that `chunk` names by `change(part, side)`; null means leave it.
 * A change may give `[part, side]` where it learns something that the part does not show.
 */
function onTool(parts, chunk, change, otherwise = () => parts) {
  if (!chunk.toolCallId) return otherwise();
  const at = lastIndex(parts, (part) => part.toolCallId === chunk.toolCallId);
  if (at < 0) return otherwise();
  const side = sides.get(parts[at]) ?? {};
  const changed = change(parts[at], side);
  if (changed === null) return parts;
  const [part, known] = Array.isArray(changed) ? changed : [changed, side];
  sides.set(part, known);
  return replaced(parts, at, part);
}

function toolStarted(parts, chunk) {
  const add = () => [...parts, newTool(chunk, "input-streaming", {})];
  return onTool(parts, chunk, () => null, add);
}

function toolInputGrew(parts, chunk) {
  return onTool(parts, chunk, (part, { raw = "" }) => {
    if (part.state !== "input-streaming" || typeof chunk.inputTextDelta !== "string") return null;
    return [{ ...part }, { raw: raw + chunk.inputTextDelta }];
  });
}

/** Input that comes after its approval was asked for is taken in; the state stays. */
function toolInputKnown(parts, chunk) {
  const input = asInput(chunk.input);
  return onTool(
    parts,
    chunk,
    (part, side) => {
      const streaming = part.state === "input-streaming";
      const missing = part.input === undefined || side.provisional;
      if (!streaming && !(missing && APPROVALS.includes(part.state))) return null;
      const state = streaming ? "input-available" : part.state;
      return [{ ...part, state, input, ...present(chunk, TOOL_EXTRAS) }, {}];
    },
    () => [...parts, newTool(chunk, "input-available", { input })],
  );
}

function toolInputFailed(parts, chunk) {
  const end = { input: asInput(chunk.input), errorText: chunk.errorText };
  return onTool(
    parts,
    chunk,
    (part) =>
      SETTLED.includes(part.state)
        ? null
        : { ...part, state: "output-error", ...end, ...present(chunk, TOOL_EXTRAS.slice(0, 2)) },
    () => [...parts, newTool({ ...chunk, title: undefined }, "output-error", end)],
  );
}

function approvalAsked(parts, chunk) {
  return onTool(parts, chunk, (part, { raw, provisional }) => {
    if (SETTLED.includes(part.state) || part.state === "approval-responded") return null;
    const approval = { id: chunk.approvalId };
    if (chunk.approvalDescriptor !== undefined) approval.descriptor = chunk.approvalDescriptor;
    const next = { ...part, state: "approval-requested", approval };
    const guessed = next.input === undefined && raw !== undefined;
    if (guessed) next.input = asInput(raw);
    return [next, { provisional: provisional || guessed }];
  });
}

function toolDenied(parts, chunk) {
  return onTool(parts, chunk, (part) =>
    SETTLED.includes(part.state) || part.state === "approval-responded"
      ? null
      : { ...part, state: "output-denied" },
  );
}

function toolAnswered(parts, chunk) {
  return onTool(parts, chunk, (part) => ({
    ...part,
    state: "output-available",
    output: chunk.output,
    ...(chunk.preliminary === undefined ? {} : { preliminary: chunk.preliminary }),
  }));
}

function toolFailed(parts, chunk) {
  return onTool(parts, chunk, (part) => ({
    ...part,
    state: "output-error",
    errorText: chunk.errorText,
  }));
}

// ------------------------------------------------------------------- everything else

const keep = (type, names) => (parts, chunk) => {
  const part = { type };
  for (const name of names) if (chunk[name] !== undefined) part[name] = chunk[name];
  return [...parts, part];
};

function dataPart(parts, chunk) {
  if (chunk.transient) return parts;
  const part = { type: chunk.type, data: chunk.data };
  if (chunk.id == null) return [...parts, part];
  const at = lastIndex(parts, (old) => old.type === chunk.type && old.id === chunk.id);
  const named = { ...part, id: chunk.id };
  return at < 0 ? [...parts, named] : replaced(parts, at, { ...parts[at], data: chunk.data });
}

const stepStarted = (parts) => [...parts, { type: "step-start" }];

const RULES = new Map([
  ["text-start", begin("text")],
  ["text-delta", extend("text")],
  ["text-end", finish("text")],
  ["reasoning-start", begin("reasoning")],
  ["reasoning-delta", extend("reasoning")],
  ["reasoning-end", finish("reasoning")],
  ["tool-input-start", toolStarted],
  ["tool-input-delta", toolInputGrew],
  ["tool-input-available", toolInputKnown],
  ["tool-input-error", toolInputFailed],
  ["tool-approval-request", approvalAsked],
  ["tool-output-denied", toolDenied],
  ["tool-output-available", toolAnswered],
  ["tool-output-error", toolFailed],
  ["file", keep("file", ["mediaType", "url"])],
  ["source-url", keep("source-url", ["sourceId", "url", "title", "providerMetadata"])],
  [
    "source-document",
    keep("source-document", ["sourceId", "mediaType", "title", "filename", "providerMetadata"]),
  ],
  ["start-step", stepStarted],
  ["step-start", stepStarted],
]);

function ruleOf(chunk) {
  if (chunk === null || typeof chunk !== "object" || typeof chunk.type !== "string") return null;
  return RULES.get(chunk.type) ?? (chunk.type.startsWith("data-") ? dataPart : null);
}

/** Whether chunks of this type speak about parts at all. */
export function isPartChunk(chunk) {
  return ruleOf(chunk) !== null;
}

/** The parts after `chunk`; `parts` itself when nothing changed. */
export function applyChunkToParts(parts, chunk) {
  const rule = ruleOf(chunk);
  return rule === null ? parts : rule(parts, chunk);
}
