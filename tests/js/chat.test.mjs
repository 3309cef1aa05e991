// The page's fold of a chat: what is shown never doubles, never loses, never goes back.
import assert from "node:assert/strict";
import { test } from "node:test";

import {
  activeTurn,
  applyChatFrame,
  ask,
  cleared,
  emptyChat,
  refused,
  stopping,
  withTranscript,
} from "../../web/js/src/chat.js";

const user = (id, text = "hi") => ({ id, role: "user", parts: [{ type: "text", text }] });
const answer = (id, text) => ({
  id,
  role: "assistant",
  parts: [{ type: "text", text, state: "done" }],
});
const frame = (seq, chunk, more = {}) => ({
  type: "cf_agent_use_chat_response",
  id: "req",
  body: JSON.stringify(chunk),
  done: false,
  seq,
  ...more,
});
const done = (more = {}) => ({
  type: "cf_agent_use_chat_response",
  id: "req",
  body: "",
  done: true,
  ...more,
});
const TURN = [
  { type: "start", messageId: "m" },
  { type: "start-step" },
  { type: "text-start", id: "t" },
  { type: "text-delta", id: "t", delta: "Hel" },
  { type: "text-delta", id: "t", delta: "lo" },
  { type: "text-end", id: "t" },
].map((chunk, seq) => frame(seq, chunk));
const replay = (frames) => frames.map((old) => ({ ...old, replay: true }));
const fold = (frames, from = emptyChat()) => frames.reduce(applyChatFrame, from);
const texts = (chat) =>
  chat.messages.map(({ parts }) => parts.map(({ text }) => text ?? "").join(""));
const asked = ask(emptyChat(), { id: "req", message: user("u") });

test("a question stands at once and its answer streams below it", () => {
  const half = fold(TURN.slice(0, 4), asked);
  const whole = fold([...TURN, done()], asked);

  assert.equal(activeTurn(asked).phase, "asked");
  assert.deepEqual(texts(half), ["hi", "Hel"]);
  assert.equal(activeTurn(half).messageId, "m");
  assert.deepEqual(texts(whole), ["hi", "Hello"]);
  assert.equal(activeTurn(whole), undefined);
});

test("at every cut, a replay over what is there gives what no cut gives", () => {
  const whole = fold([...TURN, done()], asked);

  for (let cut = 0; cut <= TURN.length; cut += 1) {
    const offer = { type: "cf_agent_stream_resuming", id: "req" };
    const cutTwice = fold(
      [...TURN.slice(0, cut), offer, ...replay(TURN.slice(0, cut)), ...replay(TURN), done()],
      asked,
    );
    assert.deepEqual(cutTwice.messages, whole.messages);
  }
});

test("without numbers, a replay after an offer rebuilds the message from its start", () => {
  const bare = TURN.map(({ seq, ...rest }) => rest);
  const offer = { type: "cf_agent_stream_resuming", id: "req" };

  const chat = fold([...bare.slice(0, 4), offer, ...replay(bare)], asked);

  assert.deepEqual(texts(chat), ["hi", "Hello"]);
});

test("a reload rebuilds the answer over the part that was stored", () => {
  const reloaded = withTranscript(emptyChat(), [user("u"), answer("m", "Hel")]);

  const chat = fold(replay(TURN), reloaded);

  assert.deepEqual(texts(chat), ["hi", "Hello"]);
});

test("a transcript keeps the message being streamed and the question not confirmed", () => {
  const half = fold(TURN.slice(0, 4), asked);
  const both = ask(half, { id: "next", message: user("u2", "and?") });

  const chat = fold([{ type: "cf_agent_chat_messages", messages: [user("u")] }], both);

  assert.deepEqual(texts(chat), ["hi", "Hel", "and?"]);
  assert.deepEqual(chat.unsent.map(({ id }) => id), ["next"]);
});

test("a transcript takes away what is settled and gone", () => {
  const whole = fold([...TURN, done()], asked);

  const chat = fold([{ type: "cf_agent_chat_messages", messages: [user("x", "new")] }], whole);

  assert.deepEqual(texts(chat), ["new"]);
});

test("a history that was asked for before an answer ended does not take the answer away", () => {
  const before = asked.count;
  const whole = fold([...TURN, done()], asked);

  assert.deepEqual(texts(withTranscript(whole, [user("u")], before)), ["hi", "Hello"]);
  assert.deepEqual(texts(withTranscript(whole, [user("u")])), ["hi"]);
});

test("a message that the server repeats unchanged stays the same object", () => {
  const whole = fold([...TURN, done()], asked);
  const copy = JSON.parse(JSON.stringify(whole.messages));

  const chat = fold([{ type: "cf_agent_chat_messages", messages: copy }], whole);

  chat.messages.forEach((message, at) => assert.equal(message, whole.messages[at]));
});

test("an idle server ends what this page took for running, not what it has yet to send", () => {
  const both = ask(fold(TURN.slice(0, 3), asked), { id: "next", message: user("u2", "and?") });

  const chat = fold([{ type: "cf_agent_stream_resume_none", reason: "idle" }], both);

  assert.equal(activeTurn(chat).id, "next");
  const other = fold([{ type: "cf_agent_stream_resume_none", reason: "continuation-owned" }], both);
  assert.equal(activeTurn(other).id, "req");
});

test("a stop is shown until the turn ends, and how it ended stays", () => {
  const half = stopping(fold(TURN.slice(0, 4), asked), "req");
  const more = fold([TURN[4]], half);
  const ended = fold([done({ outcome: "aborted" })], more);

  assert.equal(activeTurn(more).phase, "stopping");
  assert.equal(activeTurn(ended), undefined);
  assert.equal(ended.notes.get("m").kind, "stopped");
  assert.deepEqual(texts(ended), ["hi", "Hello"]);
});

test("an error is text, never a chunk", () => {
  const failed = fold(
    [...TURN.slice(0, 4), { ...done(), error: true, body: '{"type":"text-delta"}' }],
    asked,
  );

  assert.deepEqual(failed.notes.get("m"), { kind: "error", text: '{"type":"text-delta"}' });
  assert.deepEqual(texts(failed), ["hi", "Hel"]);
});

test("late frames of a turn that a clear ended stay out", () => {
  const chat = fold(TURN.slice(4), cleared(fold(TURN.slice(0, 4), asked)));

  assert.deepEqual(chat.messages, []);
  assert.equal(activeTurn(chat), undefined);
});

test("a question that is not taken is over, with the reason, and the others wait on", () => {
  const both = ask(asked, { id: "n", message: user("u2", "and?") });

  const chat = refused(both, "n", "too large");

  assert.deepEqual(chat.unsent.map(({ id }) => id), [asked.unsent[0].id]);
  assert.deepEqual(chat.turns.at(-1), { id: "n", messageId: "u2", next: 0, phase: "over", outcome: "error" });
  assert.deepEqual(chat.notes.get("u2"), { kind: "error", text: "too large" });
});

test("of turns that are over the newest are known, of those that go on all", () => {
  const turn = (id) => [{ ...TURN[0], id }, { ...done(), id }];
  const many = Array.from({ length: 600 }, (_, at) => turn(`t${at}`)).flat();

  const chat = fold(many, asked);

  assert.equal(chat.turns.length, 256);
  assert.equal(chat.turns[0].phase, "asked");
  assert.deepEqual([chat.turns[1].id, chat.turns.at(-1).id], ["t345", "t599"]);
});

test("a continuation goes on in the last answer", () => {
  const stored = withTranscript(emptyChat(), [user("u"), answer("m", "Hello")]);
  const more = [{ type: "text-start", id: "t" }, { type: "text-delta", id: "t", delta: " again" }];

  const chat = fold(more.map((chunk, seq) => frame(seq, chunk, { continuation: true })), stored);

  assert.deepEqual(texts(chat), ["hi", "Hello again"]);
});

test("frames of other kinds and malformed ones leave the very chat they met", () => {
  const odd = [{ type: "rpc" }, { type: "cf_agent_chat_messages" }, { type: 1 },
    { type: "cf_agent_use_chat_response" }, { type: "cf_agent_stream_pending" },
    { type: "cf_agent_message_updated" }];

  for (const one of odd) assert.equal(applyChatFrame(asked, one), asked);
});
