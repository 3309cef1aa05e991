// A chat as a client sees it: frames, history and questions in, messages and turns out. Pure.
//
// A turn is known by its request id. Its chunks carry `seq`, so a replay over what is already
// here changes nothing. A transcript replaces the list, but never takes away what this page
// knows better: the message being streamed, a question the server has not confirmed, and
// whatever changed while a history request was under way.

import { applyChunkToParts } from "./parts.js";

/**
 * `messages`: UIMessages. `turns`: `{id, messageId, next, phase}`, oldest first, where phase is
 * `asked`, `accepted`, `streaming`, `stopping` or `over` (then with its `outcome`, where the
 * server told it). `unsent`: request id and message id of
 * questions not confirmed yet. `notes`: message id to `{kind, text}` of a turn's unusual end.
 * `touched`: message id to the `count` at its last change made here.
 */
export function emptyChat() {
  return { messages: [], turns: [], unsent: [], notes: new Map(), touched: new Map(), count: 0 };
}

const isLive = (turn) => turn.phase !== "over";

/** The turn that runs or waits in front of all others; undefined when the chat is idle. */
export function activeTurn(chat) {
  return chat.turns.find(isLive);
}

const KEPT = 256; // turns: of those that are over only the newest, to keep their late frames out

function withTurn(chat, turn) {
  const known = chat.turns.some(({ id }) => id === turn.id);
  const turns = known
    ? chat.turns.map((old) => (old.id === turn.id ? turn : old))
    : [...chat.turns, turn];
  const oldest = turns.length > KEPT ? turns.findIndex((old) => !isLive(old)) : -1;
  return { ...chat, turns: oldest < 0 ? turns : turns.toSpliced(oldest, 1) };
}

function turnOf(chat, id) {
  return (
    chat.turns.find((turn) => turn.id === id) ?? { id, messageId: null, next: 0, phase: "accepted" }
  );
}

function withMessage(chat, message) {
  const at = chat.messages.findIndex(({ id }) => id === message.id);
  const messages = chat.messages.slice();
  messages.splice(at < 0 ? messages.length : at, at < 0 ? 0 : 1, message);
  const count = chat.count + 1;
  return { ...chat, messages, count, touched: new Map(chat.touched).set(message.id, count) };
}

const confirmed = (chat, id) => ({
  ...chat,
  unsent: chat.unsent.filter((question) => question.id !== id),
});

// --------------------------------------------------------------------------- questions

/** The chat with a question put in, shown at once. `message`: a UIMessage of the user's. */
export function ask(chat, { id, message }) {
  const next = withTurn(withMessage(chat, message), { ...turnOf(chat, id), phase: "asked" });
  return { ...next, unsent: [...chat.unsent, { id, messageId: message.id }] };
}

/** The chat where a question was put in that the server does not take; `text` says why. */
export function refused(chat, id, text) {
  const { messageId } = chat.unsent.find((question) => question.id === id);
  const turn = { ...turnOf(chat, id), messageId, phase: "over", outcome: "error" };
  return withTurn(withNote(confirmed(chat, id), turn, "error", text), turn);
}

export function stopping(chat, id) {
  return withTurn(chat, { ...turnOf(chat, id), phase: "stopping" });
}

/** An empty chat that still knows the turns it was told about, so that late frames stay out. */
export function cleared(chat) {
  const over = (turn) => (isLive(turn) ? { ...turn, phase: "over", outcome: "skipped" } : turn);
  const turns = chat.turns.map(over);
  return { ...emptyChat(), turns, count: chat.count + 1 };
}

// ------------------------------------------------------------------------- transcripts

/**
 * The chat with the server's list. `since`: the `count` when the list was asked for; for a
 * list that came in order with the frames, leave it out.
 */
export function withTranscript(chat, list, since = chat.count) {
  const messages = list.filter((message) => message && Array.isArray(message.parts));
  const there = new Set(messages.map(({ id }) => id));
  const unsent = chat.unsent.filter(({ messageId }) => !there.has(messageId));
  const ours = new Set([
    ...chat.turns.filter(isLive).map((turn) => turn.messageId),
    ...unsent.map((question) => question.messageId),
    ...chat.messages.map(({ id }) => id).filter((id) => (chat.touched.get(id) ?? 0) > since),
  ]);
  const mine = new Map(chat.messages.filter(({ id }) => ours.has(id)).map((m) => [m.id, m]));
  const merged = messages.map((message) => mine.get(message.id) ?? kept(chat, message));
  const tail = [...mine.values()].filter(({ id }) => !there.has(id));
  return { ...chat, messages: [...merged, ...tail], unsent };
}

/** The old object when the server's says the same, so that a view sees no change. */
function kept(chat, message) {
  const old = chat.messages.find(({ id }) => id === message.id);
  return old && JSON.stringify(old) === JSON.stringify(message) ? old : message;
}

// ------------------------------------------------------------------------------- turns

function begun(chat, turn, frame, chunk) {
  if (turn.messageId !== null && chunk.messageId === undefined) return [chat, turn];
  const last = chat.messages.at(-1);
  const goesOn = frame.continuation && last?.role === "assistant";
  const id = chunk.messageId ?? (goesOn ? last.id : `answer-${turn.id}`);
  if (id === turn.messageId) return [chat, turn];
  const named = { ...turn, messageId: id };
  if (goesOn && chunk.messageId === undefined) return [chat, named];
  const old = chat.messages.find((message) => message.id === id);
  return [withMessage(chat, { role: "assistant", ...old, id, parts: [] }), named];
}

function withChunk(chat, turn, frame, chunk) {
  let [next, now] = begun(chat, turn, frame, chunk.type === "start" ? chunk : {});
  const message = next.messages.find(({ id }) => id === now.messageId);
  const parts = message ? applyChunkToParts(message.parts, chunk) : [];
  if (message && parts !== message.parts) next = withMessage(next, { ...message, parts });
  if (chunk.type === "error") next = withNote(next, now, "error", chunk.errorText);
  return [next, now];
}

function withNote(chat, turn, kind, text) {
  const about = turn.messageId ?? chat.messages.at(-1)?.id;
  if (about === undefined) return chat;
  return { ...chat, notes: new Map(chat.notes).set(about, { kind, text }) };
}

function parsed(text) {
  try {
    const chunk = JSON.parse(text);
    return chunk !== null && typeof chunk === "object" && typeof chunk.type === "string" ? chunk : null;
  } catch {
    return null;
  }
}

function response(chat, frame) {
  const turn = turnOf(chat, frame.id);
  if (turn.phase === "over") return chat;
  let next = confirmed(chat, frame.id);
  let now = turn.phase === "stopping" ? turn : { ...turn, phase: "streaming" };
  if (frame.error) next = withNote(next, now, "error", frame.body);
  const chunk = frame.error ? null : parsed(frame.body);
  if (chunk !== null) {
    const numbered = Number.isInteger(frame.seq);
    if (numbered && frame.seq < turn.next) return withTurn(next, now);
    if (!numbered && frame.replay && turn.rebuild) now = { ...now, messageId: null };
    now = { ...now, rebuild: false, next: numbered ? frame.seq + 1 : turn.next };
    [next, now] = withChunk(next, now, frame, chunk);
  }
  if (!frame.done) return withTurn(next, now);
  if (frame.outcome === "aborted") next = withNote(next, now, "stopped", "");
  if (frame.outcome === "skipped") next = withNote(next, now, "skipped", "");
  const outcome = frame.outcome ?? (next.notes.get(now.messageId)?.kind === "error" ? "error" : "completed");
  return withTurn(next, { ...now, phase: "over", outcome });
}

function offered(chat, frame, phase) {
  if (typeof frame.id !== "string") return chat;
  const turn = turnOf(chat, frame.id);
  if (turn.phase === "over") return chat;
  const same = turn.phase === "stopping" || turn.phase === "streaming";
  const next = { ...turn, rebuild: true, phase: same ? turn.phase : phase };
  return withTurn(confirmed(chat, frame.id), next);
}

/** Nothing runs for us: whatever this page still took for running has ended meanwhile. */
function idle(chat, frame, awaited) {
  if (frame.reason === "continuation-owned") return chat;
  const stay = new Set([...chat.unsent.map(({ id }) => id), ...awaited]);
  const turns = chat.turns.map((turn) => (stay.has(turn.id) ? turn : { ...turn, phase: "over" }));
  return { ...chat, turns };
}

/** The chat where a turn is over of whose end nothing is known. */
export function ended(chat, id) {
  return withTurn(chat, { ...turnOf(chat, id), phase: "over" });
}

function updated(chat, message) {
  const streaming = chat.turns.some((turn) => isLive(turn) && turn.messageId === message?.id);
  const known = chat.messages.some(({ id }) => id === message?.id);
  return known && !streaming && Array.isArray(message.parts) ? withMessage(chat, message) : chat;
}

/**
 * The chat after a frame; `chat` itself when the frame is none of a chat's. `awaited`: ids of
 * turns whose end is asked for, so that they are not over because nothing runs.
 */
export function applyChatFrame(chat, frame, { awaited = [] } = {}) {
  switch (frame.type) {
    case "cf_agent_use_chat_response":
      return typeof frame.id === "string" ? response(chat, frame) : chat;
    case "cf_agent_chat_messages":
      return Array.isArray(frame.messages) ? withTranscript(chat, frame.messages) : chat;
    case "cf_agent_stream_resuming":
      return offered(chat, frame, "streaming");
    case "cf_agent_stream_pending":
      return offered(chat, frame, "accepted");
    case "cf_agent_stream_resume_none":
      return idle(chat, frame, awaited);
    case "cf_agent_message_updated":
      return updated(chat, frame.message);
    case "cf_agent_chat_clear":
      return cleared(chat);
    default:
      return chat;
  }
}
