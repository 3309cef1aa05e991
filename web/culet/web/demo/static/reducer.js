// Runs as a client sees them: frames in, state out. Pure and total.
//
// The same frame twice, a replay over live frames, or frames of any other type never change
// the picture: a chunk counts once by (tool call id, run id, sequence), and is only marked as
// seen when its run is known. The first terminal frame of a run stands. Whatever changes
// nothing returns the very state object that came in, so a view can compare by identity.

import { applyChunkToParts, isPartChunk } from "./parts.js";

export { applyChunkToParts, isPartChunk } from "./parts.js";

const PROGRESS = "data-agent-progress";
const MILESTONE = "data-agent-milestone";

/** Ids are any text, `__proto__` included, so tables have no prototype. */
const table = (...from) => Object.assign(Object.create(null), ...from);

/**
 * `runsById`, `runsByToolCallId` and `unboundRuns` are for readers; `seen` (the sequences
 * taken, as ranges) and `protocolErrors` (a second, different end of a run) are bookkeeping.
 */
export function emptyState() {
  return {
    runsById: table(),
    runsByToolCallId: table(),
    unboundRuns: [],
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

// ----------------------------------------------------------------------- run changes

/** A run without a tool call, or with an empty id of one, is unbound. */
const callOf = (run) => run.parentToolCallId || null;

function withRun(state, run) {
  const before = state.runsById[run.runId] ?? run;
  const next = { ...state, runsById: table(state.runsById, { [run.runId]: run }) };
  for (const call of new Set([callOf(before), callOf(run)])) {
    const runs = Object.values(next.runsById).filter((other) => callOf(other) === call);
    runs.sort(siblingOrder);
    if (call === null) next.unboundRuns = runs;
    else next.runsByToolCallId = table(next.runsByToolCallId, { [call]: runs });
    if (call !== null && runs.length === 0) delete next.runsByToolCallId[call];
  }
  return next;
}

function sameMembers(a, b) {
  const names = Object.keys(a);
  const equal = (x, y) => x === y || JSON.stringify(x) === JSON.stringify(y);
  return names.length === Object.keys(b).length && names.every((name) => equal(a[name], b[name]));
}

function started(state, frame, event) {
  const before = state.runsById[event.runId];
  if (typeof event.agentType !== "string" || (before && before.status !== "running")) return state;
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
  return before && sameMembers(before, run) ? state : withRun(state, run);
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

/** Progress and milestones count by themselves: some servers give them a chunk's number. */
const countedAs = ({ type }) => (type === PROGRESS || type === MILESTONE ? type : "");

function chunk(state, frame, event) {
  const before = state.runsById[event.runId];
  const body = before && Number.isInteger(frame.sequence) ? parsed(event.body) : null;
  if (body === null) return state;
  const key = JSON.stringify([frame.parentToolCallId ?? "", event.runId, countedAs(body)]);
  const ranges = state.seen[key] ?? [];
  if (holds(ranges, frame.sequence)) return state;
  if (!isPartChunk(body)) return state;
  const run = withChunk(before, body);
  // Seen also where it did nothing: come again later, it might find a part to change.
  const next = run === before ? { ...state } : withRun(state, run);
  next.seen = table(state.seen, { [key]: withNumber(ranges, frame.sequence) });
  return next;
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

function ended(state, event) {
  const before = state.runsById[event.runId];
  if (!before) return state;
  const run = { ...before };
  for (const [name, value] of Object.entries(ENDS[event.kind](event))) {
    if (value !== undefined) run[name] = value;
  }
  if (before.status === "running") return withRun(state, run);
  if (before.status === run.status) return state;
  return { ...state, protocolErrors: state.protocolErrors + 1 };
}

/** The state after `frame`; `state` itself when the frame changes nothing. */
export function applyAgentToolEvent(state, frame) {
  const event = frame?.type === "agent-tool-event" ? frame.event : null;
  if (event === null || typeof event !== "object" || typeof event.runId !== "string") return state;
  if (event.kind === "started") return started(state, frame, event);
  if (event.kind === "chunk") return chunk(state, frame, event);
  return Object.hasOwn(ENDS, event.kind) ? ended(state, event) : state;
}

/** The runs that one tool call dispatched, in their stable order. */
export function runsOf(state, toolCallId) {
  return state.runsByToolCallId[toolCallId] ?? [];
}
