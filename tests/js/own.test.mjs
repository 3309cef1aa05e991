// The client of `web/js` against the real server.
//
// CULET_URL=http://127.0.0.1:8787 node --test own.test.mjs (the server: server.py)
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { after, test } from "node:test";

import { closeDocument, mount, mountNode, until, watched } from "./hooks.mjs"; // first: it makes the document
import { cuttable } from "./cut.mjs";

import { useAgent as usePublishedAgent, useAgentToolEvents as usePublishedEvents } from "agents/react";
import { transform } from "esbuild";
import React from "react";
import WebSocket from "ws";

import { AgentClient, CallFailed, ConnectionEnded, ConnectionLost, UsageError } from "culet";
import { askOverHttp } from "culet/http";
import { useAgentClient, useAgentToolEvents } from "culet/react";

const URL_GIVEN = process.env.CULET_URL ?? "";
const options = { skip: URL_GIVEN ? false : "CULET_URL is not set", timeout: 60_000 };
const fresh = (name) => `${name}-${crypto.randomUUID().slice(0, 8)}`;
const REPLY = Array.from({ length: 40 }, (_, at) => `w${at}`).join(" ");
const QUICK = { chance: () => 0, WebSocket };

after(closeDocument);

function open(t, agent, name, more = {}) {
  const place = more.place ?? { agent, name, host: URL_GIVEN, ...more };
  const client = new AgentClient(place, { ...QUICK, ...more });
  t.after(() => client.close());
  return client;
}
const when = (client, what, holds) => until(what, () => holds(client.snapshot), (look) => client.subscribe(look));
const textOf = ({ parts }) => parts.filter(({ type }) => type === "text").map(({ text }) => text).join("");
const ended = (count) => ({ runs }) =>
  runs.unboundRuns.length + Object.values(runs.runsByToolCallId).flat().length === count &&
  Object.values(runs.runsById).every(({ status }) => status !== "running");

test("it is ready when it knows who it talks to and what the state is", options, async (t) => {
  const name = fresh("ready");
  const client = await open(t, "Supervisor", name).ready;

  const { identified, agent, link } = client.snapshot;
  assert.deepEqual([identified, client.snapshot.name, agent, link.kind], [true, name, "supervisor", "open"]);
  assert.deepEqual(client.state, { n: 0 });
});

test("calls return, fail by name, and stream", options, async (t) => {
  const client = open(t, "Supervisor", fresh("call"));

  assert.equal(await client.call("ping", ["hällo"]), "hällo");
  await assert.rejects(client.call("no_such_method"), CallFailed);
  const counting = client.stream("count", [4]);
  const items = [];
  let step = await counting.next();
  for (; !step.done; step = await counting.next()) items.push(step.value);
  assert.deepEqual([items, step.value], [[0, 1, 2, 3], 4]);
  await assert.rejects(async () => {
    for await (const _ of client.stream("no_such_method")) assert.fail("it said something");
  }, CallFailed);
});

test("a call can be forgotten", options, async (t) => {
  const client = await open(t, "Supervisor", fresh("forget")).ready;
  const leave = new AbortController();
  const call = client.call("research", [1], { signal: leave.signal });

  leave.abort();

  await assert.rejects(call, { name: "AbortError" });
  assert.equal(await client.call("ping", ["on"]), "on");
});

test("a state that one sets is the state of all", options, async (t) => {
  const name = fresh("state");
  const [one, two] = [open(t, "Supervisor", name), open(t, "Supervisor", name)];
  await Promise.all([one.ready, two.ready]);

  await one.setState({ n: 7 });

  assert.deepEqual(one.state, { n: 7 });
  await when(two, "the state", ({ state }) => state.n === 7);
});

test("clients that set the state at one time end with the same", options, async (t) => {
  const name = fresh("race");
  const all = [1, 2, 3].map(() => open(t, "Supervisor", name));
  await Promise.all(all.map(({ ready }) => ready));
  const states = () => all.map(({ state }) => state.n);

  for (let n = 1; n < 60; n += 2) {
    await Promise.all([all[0].setState({ n }), all[1].setState({ n: n + 1 })]);
    await Promise.all(all.map((client) => client.call("ping", ["after it"])));
    assert.equal(new Set(states()).size, 1, `${states()}`);
  }
});

test("an agent below is reached by its steps, where a gate lets it be", options, async (t) => {
  const name = fresh("below");
  const note = await open(t, "Supervisor", name, { place: `${URL_GIVEN}/desk/${name}/sub/note/a%2Fb` }).ready;
  const worker = open(t, "Supervisor", name, { sub: [{ agent: "Worker", name: "guessed" }] });

  assert.deepEqual(await note.call("where"), [name, "a/b"]);
  await assert.rejects(worker.ready, ConnectionEnded);
});

test("who is refused hears it once and tries no more", options, async (t) => {
  const client = open(t, "NoSuchClass", fresh("none"));

  await assert.rejects(client.ready, ConnectionEnded);
  await assert.rejects(client.call("ping", ["x"]), ConnectionEnded);
  assert.equal(client.snapshot.link.kind, "refused");
  assert.throws(() => client.ask("hi"), UsageError);
});

test("a call that was on its way is lost, one that was not goes over the next socket", options, async (t) => {
  const proxy = await cuttable(t, new URL(URL_GIVEN).host);
  const client = await open(t, "Supervisor", fresh("lost"), { host: `http://${proxy.host}` }).ready;
  const before = client.call("research", [1]);
  await when(client, "the run has begun", ({ runs }) => Object.keys(runs.runsById).length === 1);

  proxy.refuse();
  await assert.rejects(before, ConnectionLost);
  const after = client.call("ping", ["again"]);
  await when(client, "waiting", ({ link }) => link.kind === "waiting");
  proxy.admit();
  client.retry();

  assert.equal(await after, "again");
});

test("who comes back is sent only what it has not of runs", options, async (t) => {
  const proxy = await cuttable(t, new URL(URL_GIVEN).host);
  const client = await open(t, "Supervisor", fresh("cursor"), { host: `http://${proxy.host}` }).ready;
  const heard = [];
  client.addEventListener("message", ({ data }) => {
    const { type, sequence, event } = JSON.parse(data);
    if (type === "agent-tool-event" && event.kind === "chunk") heard.push(`${event.runId} ${sequence}`);
  });
  client.call("research", [3]).catch(() => undefined);
  await when(client, "words", ({ runs }) => Object.values(runs.runsById).some((run) => textOf(run)));
  proxy.cut();
  await when(client, "all three have ended", ended(3));

  assert.equal(new Set(heard).size, 30, "three runs of ten chunks");
  assert.equal(heard.length, 30, "none came twice");
});

test("an answer streams, and is whole", options, async (t) => {
  const client = await open(t, "ChatBot", fresh("chat"), { chat: true }).ready;
  const seen = [];
  client.subscribe(({ chat }) => seen.push(chat.messages.at(-1)?.role === "assistant" ? textOf(chat.messages.at(-1)).length : 0));

  const { outcome, message } = await client.ask("hi").done;

  assert.equal(outcome, "completed");
  assert.equal(textOf(message), REPLY);
  assert.ok(new Set(seen).size > 5, "it came in pieces");
  assert.deepEqual(seen, [...seen].sort((a, b) => a - b));
});

test("an answer goes on over sockets that are cut, nothing lost and nothing doubled", options, async (t) => {
  const proxy = await cuttable(t, new URL(URL_GIVEN).host);
  const client = await open(t, "ChatBot", fresh("cut"), { chat: true, host: `http://${proxy.host}` }).ready;

  const { done } = client.ask("hi");
  for (const length of [3, 40, 90]) {
    await when(client, `${length} characters`, ({ chat }) => textOf(chat.messages[1] ?? { parts: [] }).length >= length);
    proxy.cut();
  }

  const { outcome, message } = await done;
  assert.equal(outcome, "completed");
  assert.equal(textOf(message), REPLY);
  assert.deepEqual(client.messages.map(({ role }) => role), ["user", "assistant"]);
});

test("a question that was asked without a socket is sent when there is one, once", options, async (t) => {
  const proxy = await cuttable(t, new URL(URL_GIVEN).host);
  const client = await open(t, "ChatBot", fresh("late"), { chat: true, host: `http://${proxy.host}` }).ready;
  await when(client, "the history", ({ loaded }) => loaded);
  proxy.refuse();
  await when(client, "waiting", ({ link }) => link.kind === "waiting");

  const { done } = client.ask("hi");
  proxy.admit();
  client.retry();

  assert.equal(textOf((await done).message), REPLY);
  assert.equal(client.messages.length, 2);
});

test("a question that is larger than the server takes fails, and is not asked again and again", options, async (t) => {
  const client = await open(t, "ChatBot", fresh("large"), { chat: true }).ready;
  await client.until(({ loaded }) => loaded);
  const [large, small] = [client.ask("\u20ac".repeat(400_000)), client.ask("hi")];
  client.subscribe(({ link }) => link.kind === "waiting" && queueMicrotask(() => client.retry()));

  await assert.rejects(large.done, { name: "CallFailed", message: /larger/ });
  assert.equal(textOf((await small.done).message), REPLY);
  assert.equal(client.snapshot.chat.unsent.length, 0);
});

test("stop ends an answer where it is, and clear forgets it", options, async (t) => {
  const name = fresh("stop");
  const [client, other] = [open(t, "ChatBot", name, { chat: true }), open(t, "ChatBot", name, { chat: true })];
  await Promise.all([client.ready, other.ready]);
  const { done } = client.ask("hi");
  await when(client, "words", ({ chat }) => textOf(chat.messages[1] ?? { parts: [] }).length > 10);

  assert.equal(client.stop(), true);

  const { outcome, message } = await done;
  assert.equal(outcome, "aborted");
  assert.ok(REPLY.startsWith(textOf(message)));
  await when(other, "the same", ({ chat }) => textOf(chat.messages[1] ?? { parts: [] }) === textOf(message));
  assert.equal(client.clear(), true);
  await when(other, "nothing", ({ chat }) => chat.messages.length === 0);
});

test("a call waits for a person, and goes on when he has said yes", options, async (t) => {
  const client = await open(t, "Clerk", fresh("approve"), { chat: true }).ready;
  await client.ask("pay where").done;
  assert.deepEqual(client.waitingCalls, client.messages.at(-1).parts.filter(({ toolCallId }) => toolCallId));
  const calls = () => client.messages.at(-1).parts.filter(({ toolCallId }) => toolCallId);
  const [pay, where] = calls();
  assert.deepEqual([pay.state, where.state], ["approval-requested", "input-available"]);

  assert.equal(await client.approveCall(pay.toolCallId), undefined);
  await client.answerCall(where.toolCallId, { seen: 3 });

  await when(client, "its end", ({ chat }) => /paid 1 times/.test(textOf(chat.messages.at(-1))));
  assert.deepEqual(calls().map(({ state }) => state), ["output-available", "output-available"]);
});

test("what a run two levels below asks is seen and answered from the top, by the first of all who look", options, async (t) => {
  const name = fresh("deep");
  const [one, two] = [open(t, "Chief", name, { chat: true }), open(t, "Chief", name, { chat: true })];
  await Promise.all([one.ready, two.ready]);
  const { done } = one.ask("pay where");
  for (const client of [one, two]) await client.until(({ waitingCalls }) => waitingCalls.length === 2);
  const [pay, where] = one.waitingCalls;
  assert.deepEqual([pay.toolName, pay.state, where.state], ["pay", "approval-requested", "input-available"]);
  const { runId } = pay;
  assert.ok(!(runId in one.runs.runsById), "it is a run of somebody below");
  await assert.rejects(one.approveCall(pay.toolCallId, true, { runId: "of-nobody" }), CallFailed);

  assert.equal(await two.approveCall(pay.toolCallId, true, { runId }), true);
  assert.equal(await one.approveCall(pay.toolCallId, false, { runId }), false);
  await one.until(({ waitingCalls }) => waitingCalls.length === 1);
  assert.equal(await one.answerCall(where.toolCallId, { at: "home" }, { runId }), true);

  assert.match(textOf((await done).message), /^so: so: paid 1 times; paid; .*home/);
  for (const client of [one, two]) await client.until(({ waitingCalls }) => waitingCalls.length === 0);
});

test("who comes later sees what is asked below, over sockets that are cut, and a gate may say no", options, async (t) => {
  const name = fresh("later");
  const first = await open(t, "Chief", name, { chat: true }).ready;
  const { done } = first.ask("pay");
  await first.until(({ waitingCalls }) => waitingCalls.length === 1);
  const proxy = await cuttable(t, new URL(URL_GIVEN).host);
  const late = await open(t, "Chief", name, { host: `http://${proxy.host}`, query: { refuse: "1" } }).ready;
  await late.until(({ waitingCalls }) => waitingCalls.length === 1);
  const [{ toolCallId, runId }] = late.waitingCalls;
  proxy.cut();
  await late.until(({ link }) => link.kind === "waiting");

  const answer = late.approveCall(toolCallId, true, { runId });
  late.retry();

  await assert.rejects(answer, { name: "CallFailed", message: /not you|refused|403/ });
  assert.equal(late.waitingCalls.length, 1, "it waits on");
  assert.equal(await first.approveCall(toolCallId, false, { runId }), true);
  assert.match(textOf((await done).message), /paid 0 times/);
  await late.until(({ waitingCalls }) => waitingCalls.length === 0);
});

test("a question over plain HTTP is answered whole over lines that are cut, each chunk once", options, async (t) => {
  const proxy = await cuttable(t, new URL(URL_GIVEN).host);
  const place = { agent: "ChatBot", name: fresh("http"), host: `http://${proxy.host}` };
  const answer = await askOverHttp(place, "hi", { chance: () => 0 });
  const words = [];
  let cuts = 0;
  for await (const chunk of answer) {
    if (chunk.type === "text-delta") words.push(chunk.delta);
    if (words.length >= 8 * (cuts + 1) && cuts < 4) {
      cuts += 1;
      proxy.cut();
    }
  }

  assert.deepEqual([cuts, words.join(""), answer.text, answer.outcome], [4, REPLY, REPLY, "completed"]);
  assert.deepEqual(answer.parts.map(({ type }) => type), ["step-start", "text"]);
});

test("a loop over an answer may be left and begun again, and the turn goes on meanwhile", options, async (t) => {
  const place = { agent: "ChatBot", name: fresh("left"), host: URL_GIVEN };
  const answer = await askOverHttp(place, "hi", { chance: () => 0, query: async () => ({ a: "b" }), headers: { "x-a": "b" } });
  for await (const { type } of answer) if (type === "text-delta") break;
  assert.ok(answer.text.length < REPLY.length);
  assert.equal(await answer.done(), REPLY);
  assert.match(answer.turn, /./);

  const failed = await askOverHttp(place, "fail");
  await assert.rejects(failed.done(), CallFailed);
  await assert.rejects(askOverHttp({ ...place, agent: "NoSuch" }, "hi"), { name: "ConnectionEnded", code: 4400 });
  await assert.rejects(askOverHttp({ ...place, host: "http://127.0.0.1:1" }, "hi"), ConnectionLost);
  const leave = new AbortController();
  const stopped = await askOverHttp(place, "hi", { signal: leave.signal });
  const reading = stopped.done();
  leave.abort();
  await assert.rejects(reading, { name: "AbortError" });
});

test("the hooks know what waits below", options, async (t) => {
  const name = fresh("hook");
  const tab = mount(() => {
    const { client, waitingCalls } = useAgentClient({ agent: "Chief", name, host: URL_GIVEN }, { ...QUICK, chat: true });
    return { client, waitingCalls, events: useAgentToolEvents({ agent: client }) };
  });
  t.after(tab.unmount);
  await tab.until("a client", ({ client }) => client !== null);
  const { done } = tab.now().client.ask("pay");
  await tab.until("a question", ({ waitingCalls, events }) => waitingCalls.length === 1 && events.waitingCalls.length === 1);

  const { waitingCalls, events, client } = tab.now();
  assert.deepEqual(events.waitingCalls, waitingCalls);
  await client.approveCall(waitingCalls[0].toolCallId, true, { runId: waitingCalls[0].runId });
  await tab.until("nothing", (value) => value.waitingCalls.length === 0 && value.events.waitingCalls.length === 0);
  await done;
});

test("with the published socket our hook knows what waits below, and a frame answers it", options, async (t) => {
  const name = fresh("theirs");
  const asker = await open(t, "Chief", name, { chat: true }).ready;
  const { done } = asker.ask("pay");
  const tab = mount(() => {
    const agent = usePublishedAgent({ agent: "Chief", name, host: new URL(URL_GIVEN).host, protocol: "ws" });
    return { agent, ...useAgentToolEvents({ agent }) };
  });
  t.after(tab.unmount);
  await tab.until("a question", ({ waitingCalls }) => waitingCalls.length === 1);

  const { agent, waitingCalls } = tab.now();
  const [{ toolCallId, runId }] = waitingCalls;
  agent.send(JSON.stringify({ type: "cf_agent_tool_approval", toolCallId, runId, approved: true }));

  await tab.until("nothing", (value) => value.waitingCalls.length === 0);
  assert.match(textOf((await done).message), /paid 1 times/);
});

test("the hooks show what the published hook shows, live, cut and mounted late", options, async (t) => {
  const name = fresh("hooks");
  const proxy = await cuttable(t, new URL(URL_GIVEN).host);
  const useIt = () => {
    const { client, ...known } = useAgentClient({ agent: "Supervisor", name, host: `http://${proxy.host}` }, QUICK);
    const none = useNothing;
    return { client, known, mine: useAgentToolEvents({ agent: client }), theirs: usePublishedEvents({ agent: client ?? none }) };
  };
  const tab = mount(useIt);
  t.after(tab.unmount);
  await tab.until("ready", ({ known }) => known.identified);
  const caller = open(t, "Supervisor", name);
  const statuses = caller.call("research", [3]);
  await tab.until("some words", ({ mine }) => Object.values(mine.runsById).some((run) => textOf(run)));
  proxy.cut();
  await tab.until("all three have ended", ({ mine }) => mine.getRunsForToolCall("call-1").length === 3
    && Object.values(mine.runsById).every(({ status }) => status !== "running"));

  assert.deepEqual(await statuses, ["completed", "completed", "completed"]);
  const plain = (value) => JSON.parse(JSON.stringify(value));
  const { mine, theirs, known } = tab.now();
  assert.deepEqual(plain(mine.runsById), plain(theirs.runsById));
  assert.deepEqual(plain(mine.runsByToolCallId), plain(theirs.runsByToolCallId));
  assert.deepEqual(plain(known.runs.runsById), plain(mine.runsById));
  const late = mount(useIt);
  t.after(late.unmount);
  await late.until("the same picture", (value) => JSON.stringify(value.mine.runsById) === JSON.stringify(mine.runsById));
  mine.resetLocalState();
  await tab.until("nothing", (value) => Object.keys(value.mine.runsById).length === 0);
});

const README = readFileSync(new URL("../../web/js/README.md", import.meta.url), "utf8");
const FENCE = "`".repeat(3);
const blocksOf = (language) => README.split(`${FENCE}${language}\n`).slice(1).map((rest) => rest.split(FENCE)[0]);
/** Runs an example of the README: what it imports is given, and the host is ours. */
const runBlock = (source, given) => {
  const code = source.replace(/^import .*$/gm, "").replace(/^export (?=function)/gm, "").replaceAll("https://example.org", URL_GIVEN);
  return new (async () => {}).constructor(...Object.keys(given), code)(...Object.values(given));
};

test("the README's examples run", options, async () => {
  const [rendered, said] = [[], []];
  const given = { AgentClient, askOverHttp, render: (...args) => rendered.push(args), console: { log: (...args) => said.push(...args) } };
  const blocks = blocksOf("js");
  assert.equal(blocks.length, 2);

  await runBlock(blocks[0], given);
  assert.deepEqual(said, [0, 1, 2]);
  assert.ok(rendered.length > 0);

  await runBlock(blocks[1], given);
  assert.deepEqual(said.slice(3, 6), ["start", "start-step", "text-start"]);
  assert.deepEqual(said.slice(-2), [REPLY, "completed"]);
});

test("the README's component asks, shows what waits below, and answers it", options, async (t) => {
  const [source] = blocksOf("jsx");
  const { code } = await transform(source, { loader: "jsx" });
  const Desk = await runBlock(`${code}; return Desk;`, { React, useAgentClient });
  const place = { agent: "Chief", name: fresh("desk"), host: URL_GIVEN };
  const shown = mountNode(t, React.createElement(Desk, { place }));
  const press = async (text) => {
    const button = () => [...shown.querySelectorAll("button")].find((one) => one.textContent === text);
    await until(text, () => button() !== undefined, watched(shown));
    button().click();
  };
  await until("a line", () => shown.querySelector("p")?.textContent === "open", watched(shown));

  await press("Ask");
  await press("pay: yes");

  await until("the answer", () => /paid 1 times/.test(shown.textContent), watched(shown));
  assert.equal(shown.querySelectorAll("button").length, 1);
});

const useNothing = { addEventListener() {}, removeEventListener() {} };
