// What the published hooks make of chats and runs, against the real server: the statements of
// docs/wire-chat.md that are about a client. The numbers are those of the rules.
//
// CULET_URL=http://127.0.0.1:8787 node --test turns.test.mjs (the server: server.py)
import assert from "node:assert/strict";
import { after, test } from "node:test";

import { closeDocument, mount } from "./hooks.mjs"; // first: it makes the document

import { AgentClient } from "agents/client";
import { useAgent, useAgentToolEvents } from "agents/react";
import { applyChunkToParts } from "agents/chat";
import { useAgentChat } from "@cloudflare/ai-chat/react";
import { useChat as useSdkChat } from "@ai-sdk/react";
import { DefaultChatTransport, readUIMessageStream } from "ai";
import WebSocket from "ws";

const URL_GIVEN = process.env.CULET_URL;
const host = URL_GIVEN ? new URL(URL_GIVEN).host : "";
const options = { skip: URL_GIVEN ? false : "CULET_URL is not set", timeout: 60_000 };
const fresh = (name) => `${name}-${crypto.randomUUID().slice(0, 8)}`;
const OLDER = process.env.CULET_PACKAGES === "older";
const REPLY = Array.from({ length: 40 }, (_, at) => `w${at}`).join(" ");
const QUICK = { minReconnectionDelay: 50, maxReconnectionDelay: 100 };

after(closeDocument);

async function tabOf(t, useIt) {
  const tab = mount(useIt);
  t.after(tab.unmount);
  await tab.until("ready", ({ agent, status }) => agent.identified && (status ?? "ready") === "ready");
  return tab;
}
const useDesk = (name, more = {}) => () => {
  const agent = useAgent({ agent: "Supervisor", name, host, ...QUICK, ...more });
  return { agent, ...useAgentToolEvents({ agent }) };
};
const useChat = (name, { bot = "ChatBot", ...more } = {}) => () => {
  const agent = useAgent({ agent: bot, name, host, ...QUICK });
  return { agent, ...useAgentChat({ agent, ...more }) };
};
const textOf = ({ parts }) => parts.filter(({ type }) => type === "text").map(({ text }) => text).join("");
const lastText = ({ messages }) => (messages.at(-1)?.role === "assistant" ? textOf(messages.at(-1)) : "");
const said = ({ messages }) => messages.map((message) => [message.role, textOf(message)]);
const idle = ({ status, isServerStreaming }) => status === "ready" && !isServerStreaming;
const over = (value) => idle(value) && lastText(value) === REPLY;
const get = async (name, agent = "chat-bot") => (await fetch(`${URL_GIVEN}/agents/${agent}/${name}/get-messages`)).json();
const stored = async (name, agent) => said({ messages: await get(name, agent) });
const HELD = "w0 w1 w2 w3"; // what the bot of that name says before it is let go on
const plain = (value) => JSON.parse(JSON.stringify(value));
const neverFailed = (tab) => assert.equal(tab.seen.some(({ status }) => status === "error"), false);

// ---------------------------------------------------------------- AgentClient, useAgent

test("W-251: AgentClient reaches an agent below by its path", options, async (t) => {
  const name = fresh("path");
  const open = (path) => {
    const client = new AgentClient({ agent: "Supervisor", name, host, WebSocket, ...QUICK, path });
    t.after(() => client.close());
    return client;
  };
  await open(undefined).ready;
  const [one, two] = [open("sub/note/a%2Fb"), open("sub/note/a%2Fb")];
  await Promise.all([one.ready, two.ready]);
  const letters = [];

  assert.deepEqual([one.name, one.agent, one.state], ["a/b", "note", { n: 0 }]);
  assert.deepEqual(await one.call("where", []), [name, "a/b"]);
  assert.equal(await one.call("spell", [], { onChunk: (letter) => letters.push(letter) }), 3);
  assert.deepEqual(letters, ["a", "/", "b"]);
  const told = new Promise((resolve) => two.addEventListener("message", resolve));
  one.setState({ n: 1 });
  await told;
  assert.deepEqual(two.state, { n: 1 });
});

test("W-252: useAgent reaches an agent below by `sub`, its state, its calls and its streams", options, async (t) => {
  const name = fresh("below");
  const sub = [{ agent: "Note", name: "a/b c" }, { agent: "Note", name: "deep" }];
  await tabOf(t, useDesk(name)); // whoever comes may make the last one of a path, and no other
  const upper = await tabOf(t, useDesk(name, { sub: sub.slice(0, 1) }));
  const one = await tabOf(t, useDesk(name, { sub }));
  const two = await tabOf(t, useDesk(name, { sub }));

  assert.deepEqual(await one.now().agent.call("where", []), [name, "a/b c", "deep"]);
  const letters = [];
  assert.equal(await one.now().agent.call("spell", [], { onChunk: (letter) => letters.push(letter) }), 4);
  assert.deepEqual(letters, [..."deep"]);
  one.now().agent.setState({ n: 3 });
  await two.until("the other's state", ({ agent }) => agent.state?.n === 3);
  assert.deepEqual(upper.now().agent.state, { n: 0 });
});

test("W-252: useAgent asks for its query again before it comes back, and says it anew", options, async (t) => {
  let asked = 0;
  const query = async () => ({ token: `t${(asked += 1)}` });
  const tab = await tabOf(t, useDesk(fresh("query"), { query, queryDeps: [] }));
  const first = tab.now().agent;
  const before = asked;

  await first.call("hang_up", [1012]).catch(() => undefined);
  await tab.until("asked again", () => asked > before);
  await tab.until("back", ({ agent }) => agent.identified && (OLDER || agent !== first));

  assert.equal(await tab.now().agent.call("ping", ["in"]), "in");
});

// -------------------------------------------------------------------------------- chats

test("W-152: regenerating puts a new answer in the place of the old, in every tab", options, async (t) => {
  const name = fresh("again");
  const [tab, other] = [await tabOf(t, useChat(name)), await tabOf(t, useChat(name))];
  tab.now().sendMessage({ text: "go" });
  await tab.until("the answer", over);
  const [, first] = tab.now().messages;

  tab.now().regenerate();
  await tab.until("a new answer begins", ({ messages }) => messages.length === 2 && messages[1].id !== first.id);
  await tab.until("the new answer", over);
  await other.until("the new answer in the other tab", (value) => over(value) && value.messages[1]?.id !== first.id);

  for (const one of [tab, other]) {
    neverFailed(one);
    assert.deepEqual(said(one.now()), [["user", "go"], ["assistant", REPLY]]);
    assert.deepEqual(one.now().messages.map(({ id }) => id), (await get(name)).map(({ id }) => id));
  }
});

test("W-105: what one tab sets the others have, and the server keeps; nothing is deleted", options, async (t) => {
  const name = fresh("set");
  const [tab, other] = [await tabOf(t, useChat(name)), await tabOf(t, useChat(name))];
  const user = (id, text) => ({ id, role: "user", parts: [{ type: "text", text }] });

  tab.now().setMessages([user("u1", "one"), user("u2", "two")]);
  await other.until("both", ({ messages }) => messages.length === 2);
  tab.now().setMessages([user("u2", "TWO")]);
  await other.until("the newer text", ({ messages }) => messages[1] && textOf(messages[1]) === "TWO");

  assert.deepEqual(said(other.now()), [["user", "one"], ["user", "TWO"]]);
  assert.deepEqual(await stored(name), [["user", "one"], ["user", "TWO"]]);
});

test("W-161: what two tabs ask at once is answered one after the other, and both see all of it", options, async (t) => {
  const name = fresh("both");
  const [one, two] = [await tabOf(t, useChat(name)), await tabOf(t, useChat(name))];
  one.now().sendMessage({ text: "first" });
  two.now().sendMessage({ text: "second" });
  const whole = ({ messages }) => messages.filter((m) => textOf(m) === REPLY).length === 2;
  await one.until("both answers", (value) => whole(value) && idle(value));
  await two.until("both answers", (value) => whole(value) && idle(value));

  const history = await stored(name);
  assert.deepEqual(history.map(([role]) => role), ["user", "assistant", "user", "assistant"]);
  assert.deepEqual(history.filter(([role]) => role === "user").map(([, text]) => text).sort(), ["first", "second"]);
  // on a busy machine the older generation shows a tab its own question behind the answer to it
  const inOrder = process.env.CULET_PACKAGES !== "older";
  const lines = (pairs) => (inOrder ? pairs : pairs.map((pair) => JSON.stringify(pair)).sort());
  const expected = JSON.stringify(lines(history));
  for (const tab of [one, two]) {
    await tab.until("what is stored", (value) => JSON.stringify(lines(said(value))) === expected);
    neverFailed(tab);
  }
});

test("W-108: who was offered a turn may stop it, as the tab that comes after a reload", options, async (t) => {
  const name = fresh("stop");
  const bot = "Held";
  const tab = await tabOf(t, useChat(name, { bot }));
  tab.now().sendMessage({ text: "go" });
  await tab.until("words", (value) => lastText(value) === HELD);
  tab.unmount();
  const again = mount(useChat(name, { bot }));
  t.after(again.unmount);
  await again.until("words after the reload", (value) => !idle(value) && lastText(value) === HELD);

  again.now().stop();
  await again.until("over", idle);
  while ((await stored(name, "held")).length < 2) await new Promise((resolve) => setTimeout(resolve, 20));

  const expected = [["user", "go"], ["assistant", HELD]];
  assert.deepEqual(await stored(name, "held"), expected);
  assert.deepEqual(said(again.now()), expected);
  await again.now().agent.call("release", []);
  again.now().sendMessage({ text: "again" });
  await again.until("the next answer", over);
  neverFailed(again);
});

test("W-160: who asked behind a turn that was cleared is told that his is skipped", options, async (t) => {
  const name = fresh("skip");
  const bot = "Held";
  const [tab, other] = [await tabOf(t, useChat(name, { bot })), await tabOf(t, useChat(name, { bot }))];
  const ends = [];
  other.now().agent.addEventListener("message", ({ data }) => {
    const { done, outcome } = JSON.parse(data);
    if (done) ends.push(outcome);
  });
  tab.now().sendMessage({ text: "go" });
  await other.until("words", (value) => lastText(value) === HELD);
  other.now().sendMessage({ text: "and?" });
  await tab.until("the question in the other tab", ({ messages }) => messages.some((m) => textOf(m) === "and?"));

  tab.now().clearHistory();
  await other.until("over", (value) => idle(value) && value.messages.length === 0);

  assert.deepEqual(ends, ["aborted", "skipped"]);
  neverFailed(other);
  assert.deepEqual(await stored(name, "held"), []);
  await other.now().agent.call("release", []);
  other.now().sendMessage({ text: "again" });
  await other.until("the next answer", over);
});

test("W-255: stop of `useChat` ends what its tab shows and not the turn, which it may take up again", options, async (t) => {
  const name = fresh("leave");
  const api = `${URL_GIVEN}/agents/held/${name}/chat`;
  const open = (more = {}) => {
    const tab = mount(() => useSdkChat({ id: "c", transport: new DefaultChatTransport({ api }), ...more }));
    t.after(tab.unmount);
    return tab;
  };
  const tab = open();
  await tab.until("mounted", () => true);
  tab.now().sendMessage({ text: "go" });
  await tab.until("words", (value) => lastText(value) === HELD);

  await tab.now().stop();
  await tab.until("ready", ({ status }) => status === "ready");
  const again = open({ resume: true, messages: await get(name, "held") });
  await again.until("words in the tab that resumes", (value) => lastText(value) === HELD);
  const client = new AgentClient({ agent: "Held", name, host, WebSocket, ...QUICK });
  t.after(() => client.close());
  await client.call("release", []);
  await again.until("all of it", (value) => value.status === "ready" && lastText(value) === REPLY);

  assert.equal(lastText(tab.now()), HELD);
  assert.deepEqual(await stored(name, "held"), [["user", "go"], ["assistant", REPLY]]);
  assert.deepEqual(said(again.now()), await stored(name, "held"));
});

// --------------------------------------------------------------------------------- runs

test("W-217: a run's agent is opened by what its start says, while it speaks", options, async (t) => {
  const name = fresh("drill");
  const desk = await tabOf(t, useDesk(name));
  const talks = desk.now().agent.call("talk", [true], { timeout: 0 });
  await desk.until("some words", ({ runsById }) => Object.values(runsById).some((run) => textOf(run) === HELD));
  const [{ subAgent }] = Object.values(desk.now().runsById);

  const inside = mount(() => {
    const agent = useAgent({ agent: "Supervisor", name, host, ...QUICK, sub: [subAgent] });
    return { agent, ...useAgentChat({ agent }) };
  });
  t.after(inside.unmount);
  await inside.until("the run streams", (value) => !idle(value) && lastText(value) === HELD);
  await inside.now().agent.call("release", []);
  await inside.until("its end", over);

  assert.equal(await talks, "completed");
  assert.deepEqual(said(inside.now()), [["user", "go"], ["assistant", REPLY]]);
  await desk.until("the end", ({ runsById }) => Object.values(runsById)[0].status === "completed");
  assert.equal(textOf(Object.values(desk.now().runsById)[0]), REPLY);
});

test("W-212: what was cleared leaves the picture of the published hook alone", options, async (t) => {
  const name = fresh("clear");
  const desk = await tabOf(t, useDesk(name));
  await desk.now().agent.call("research", [2]);
  await desk.until("two runs", ({ runsById }) => Object.values(runsById).filter(({ status }) => status === "completed").length === 2);
  const before = plain(desk.now().runsById);

  assert.equal(await desk.now().agent.call("forget", []), 2);
  await desk.now().agent.call("research", [1]);
  await desk.until("a third", ({ runsById }) => Object.values(runsById).filter(({ status }) => status === "completed").length === 3);

  for (const [runId, run] of Object.entries(before)) assert.deepEqual(plain(desk.now().runsById[runId]), run);
  const late = await tabOf(t, useDesk(name));
  await late.until("what is left", ({ runsById }) => Object.values(runsById).some(({ status }) => status === "completed"));
  assert.equal(Object.keys(late.now().runsById).length, 1);
});

// ------------------------------------------------------------------------------- chunks

/** A part as both reducers show it: without what only one of them keeps. */
const common = (part) => {
  const { id, toolName, rawInput, preliminary, type, ...rest } = part;
  const name = type === "dynamic-tool" ? `tool-${toolName}` : type;
  return Object.fromEntries(Object.entries({ type: name, ...rest }).filter(([, value]) => value !== undefined));
};

test("W-232 W-235: both published reducers and the server make the same message of a turn", options, async () => {
  const name = fresh("fold");
  const chunks = [];
  const api = `${URL_GIVEN}/agents/scribe/${name}/chat`;
  const transport = new DefaultChatTransport({ api }); // it takes no chunk that its schema refuses
  const asked = { id: "u", role: "user", parts: [{ type: "text", text: "write" }] };
  const stream = await transport.sendMessages({ chatId: "c", messages: [asked], trigger: "submit-message" });
  const noted = stream.pipeThrough(new TransformStream({
    transform(chunk, out) {
      chunks.push(structuredClone(chunk));
      out.enqueue(chunk);
    },
  }));
  let sdk;
  for await (const message of readUIMessageStream({ stream: noted, terminateOnError: true })) sdk = message;
  const hook = [];
  for (const chunk of chunks) applyChunkToParts(hook, chunk);

  const [, kept] = await get(name, "scribe");
  const kinds = new Set(chunks.map(({ type }) => type));
  for (const kind of ["reasoning-delta", "text-delta", "tool-input-available", "tool-output-available",
    "tool-output-error", "message-metadata", "finish-step", "finish"]) assert.ok(kinds.has(kind), kind);
  assert.deepEqual(plain(hook).map(common), kept.parts.map(common));
  assert.deepEqual(plain(sdk.parts).map(common), kept.parts.map(common));
  assert.equal(sdk.id, kept.id);
  assert.deepEqual(plain(sdk.metadata), kept.metadata);
});
