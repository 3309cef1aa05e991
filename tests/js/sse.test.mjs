// The AI SDK's own `useChat` over plain HTTP, against the real server.
//
// CULET_URL=http://127.0.0.1:8787 node --test sse.test.mjs (the server: server.py)
import assert from "node:assert/strict";
import { after, test } from "node:test";

import { closeDocument, mount } from "./hooks.mjs"; // first: it makes the document

import { useChat } from "@ai-sdk/react";
import { DefaultChatTransport } from "ai";

const URL_GIVEN = process.env.CULET_URL ?? "";
const options = { skip: URL_GIVEN ? false : "CULET_URL is not set", timeout: 60_000 };
const fresh = (name) => `${name}-${crypto.randomUUID().slice(0, 8)}`;
const REPLY = Array.from({ length: 40 }, (_, at) => `w${at}`).join(" ");

after(closeDocument);

/** A page of another origin cannot send this without asking first. */
const asJson = { method: "POST", headers: { "content-type": "application/json" }, body: "{}" };
const urlOf = (name) => `${URL_GIVEN}/agents/mood/${name}`;
const stored = async (name) => (await fetch(`${urlOf(name)}/get-messages`)).json();

/** A tab; `calls` notes how each request of it was answered. */
async function openChat(t, name, { calls = [], ...more } = {}) {
  let answered;
  const firstAnswer = new Promise((resolve) => (answered = resolve));
  const watched = async (url, init) => {
    const answer = await fetch(url, init);
    calls.push([init?.method ?? "GET", answer.status]);
    answered();
    return answer;
  };
  const transport = new DefaultChatTransport({ api: `${urlOf(name)}/chat`, fetch: watched });
  const tab = mount(() => useChat({ id: "the/chat", transport, ...more }));
  t.after(tab.unmount);
  await tab.until("mounted", () => true);
  return { ...tab, firstAnswer };
}
const textOf = (message) => (message?.parts ?? []).filter(({ type }) => type === "text").map(({ text }) => text).join("");
const last = ({ messages }) => (messages.at(-1)?.role === "assistant" ? textOf(messages.at(-1)) : "");
const over = (value) => value.status === "ready" && last(value) === REPLY;

test("a question streams its answer, data parts with it, and the server has stored the same", options, async (t) => {
  const name = fresh("send");
  const heard = [];
  const tab = await openChat(t, name, { onData: (part) => heard.push(part.type) });

  tab.now().sendMessage({ text: "hi" });
  await tab.until("the answer", over);

  const parts = tab.now().messages[1].parts;
  assert.deepEqual(parts.filter(({ type }) => type.startsWith("data-")), [{ type: "data-mood", id: "m", data: { feels: "well" } }]);
  assert.deepEqual(heard, ["data-mood", "data-blink"]);
  assert.ok(new Set(tab.seen.map((value) => last(value).length)).size > 5, "it came in pieces");
  assert.equal(tab.seen.some(({ status }) => status === "error"), false);
  const messages = await stored(name);
  assert.deepEqual(messages.map(({ id, role }) => [id, role]), tab.now().messages.map(({ id, role }) => [id, role]));
  assert.equal(textOf(messages[1]), REPLY);
});

test("a tab that opens in mid-answer goes on with it, one that opens later has nothing to resume", options, async (t) => {
  const name = fresh("resume");
  const calls = [];
  const tab = await openChat(t, name);
  tab.now().sendMessage({ text: "hi" });
  await tab.until("words", (value) => last(value).length > 20);
  tab.unmount(); // a reload: its request is cut, the turn goes on

  const again = await openChat(t, name, { calls, messages: await stored(name), resume: true });
  await again.until("the answer", over);

  assert.deepEqual(again.now().messages.map(({ role }) => role), ["user", "assistant"]);
  const messages = await stored(name);
  assert.deepEqual(messages.map(({ id }) => id), again.now().messages.map(({ id }) => id));
  const late = await openChat(t, name, { calls, messages, resume: true });
  await late.firstAnswer;
  await late.until("idle", ({ status }) => status === "ready");
  assert.deepEqual(calls, [["GET", 200], ["GET", 204]]);
  assert.equal(last(late.now()), REPLY);
});

test("stop leaves what was said, and the server's stop ends the turn", options, async (t) => {
  const name = fresh("stop");
  const tab = await openChat(t, name);
  tab.now().sendMessage({ text: "hi" });
  await tab.until("words", (value) => last(value).length > 20);

  assert.equal((await fetch(`${urlOf(name)}/chat/any/stop`, asJson)).status, 204);
  await tab.until("ready", ({ status }) => status === "ready");

  const messages = await stored(name);
  assert.ok(textOf(messages[1]).length < REPLY.length);
  assert.equal(last(tab.now()), textOf(messages[1]));
  tab.now().sendMessage({ text: "again" });
  await tab.until("the next answer", over);
});

test("what the server refuses is told with its words", options, async (t) => {
  const transport = new DefaultChatTransport({ api: `${URL_GIVEN}/agents/no-such-class/x/chat` });
  const tab = mount(() => useChat({ transport }));
  t.after(tab.unmount);
  await tab.until("mounted", () => true);

  tab.now().sendMessage({ text: "hi" });
  await tab.until("an error", ({ status }) => status === "error");

  assert.match(tab.now().error.message, /no-such-class/);
});
