// The published JavaScript clients against Culet's gateway at CULET_URL (see server.py).
//
// The server there has, at the default prefix and without authentication:
//   Supervisor  state {"n": 0} at first; @rpc `ping(text)` gives the text back; `count(n)`
//               streams 0 … n-1, then its final value n; `research(k)` runs k agent tools of
//               class Worker and returns the list of their statuses.
//   Note        a facet of it; state {"n": 0} at first; @rpc `where()` gives the names of its path.
//               Facets are also reached by a route of the service's own: /desk/{name}/sub/….
//   Worker      streams a text of at least 5 deltas, at least 20 ms apart.
//   ChatBot     answers every message with REPLY, a word a delta, at least 20 ms apart; it
//               fails with "out of words" after five of them when it is told to `fail`.
import assert from "node:assert/strict";
import { after, test } from "node:test";

import { closeDocument, mount, until } from "./hooks.mjs"; // first: it makes the document
import { apart } from "./apart.mjs";

import { useAgent, useAgentToolEvents } from "agents/react";
import { AgentClient } from "agents/client";
import { useAgentChat } from "@cloudflare/ai-chat/react";
import WebSocket from "ws";

const URL_GIVEN = process.env.CULET_URL;
const host = URL_GIVEN ? new URL(URL_GIVEN).host : "";
const options = { skip: URL_GIVEN ? false : "CULET_URL is not set", timeout: 60_000 };
const fresh = (name) => `${name}-${crypto.randomUUID().slice(0, 8)}`;
const ACTIVE = ["submitted", "streaming"];

/** What ChatBot says: forty different words, so that a lost or doubled one shows. */
export const REPLY = Array.from({ length: 40 }, (_, at) => `w${at}`).join(" ");

after(closeDocument);

test("the packages are of the generation that is asked for", () => {
  const older = new URL("./older/", import.meta.url).href;
  const found = import.meta.resolve("@cloudflare/ai-chat/react");
  assert.equal(found.startsWith(older), process.env.CULET_PACKAGES === "older", found);
});

// -------------------------------------------------------------------------- AgentClient

function openClient(t, name, more = {}) {
  const client = new AgentClient({ agent: "Supervisor", name, host, WebSocket, ...more });
  t.after(() => client.close());
  return client;
}

const onFrames = (client) => (look) => {
  client.addEventListener("message", look);
  return () => client.removeEventListener("message", look);
};

test("AgentClient becomes ready, knows who it talks to and what the state is", options, async (t) => {
  const name = fresh("ready");
  const client = openClient(t, name);

  await client.ready;

  assert.equal(client.identified, true);
  assert.equal(client.name, name);
  assert.equal(client.agent, "supervisor");
  assert.deepEqual(client.state, { n: 0 });
});

test("AgentClient calls a method and gets its value", options, async (t) => {
  const client = openClient(t, fresh("call"));

  assert.equal(await client.call("ping", ["hällo"]), "hällo");
  assert.equal(await client.stub.ping("again"), "again");
  const many = await Promise.all(Array.from({ length: 20 }, (_, at) => client.call("ping", [`${at}`])));
  assert.deepEqual(many, Array.from({ length: 20 }, (_, at) => `${at}`));
});

test("AgentClient is told when a method fails or does not exist, and goes on", options, async (t) => {
  const client = openClient(t, fresh("fail"));

  await assert.rejects(client.call("no_such_method", []));
  await assert.rejects(client.call("set_state", [{ n: 9 }]));
  await assert.rejects(client.call("ping", []));
  assert.equal(await client.call("ping", ["still here"]), "still here");
});

test("AgentClient streams a call: chunks in order, then the final value", options, async (t) => {
  const client = openClient(t, fresh("stream"));
  const chunks = [];

  const final = await client.call("count", [5], { onChunk: (chunk) => chunks.push(chunk) });

  assert.deepEqual(chunks, [0, 1, 2, 3, 4]);
  assert.equal(final, 5);
});

test("AgentClient's state change reaches the others and is still there later", options, async (t) => {
  const name = fresh("state");
  const [one, two] = [openClient(t, name), openClient(t, name)];
  await Promise.all([one.ready, two.ready]);

  one.setState({ n: 7 });
  await until("the other client has the state", () => two.state?.n === 7, onFrames(two));

  const three = openClient(t, name);
  await three.ready;
  assert.deepEqual(three.state, { n: 7 });
});

test("AgentClient comes back after a lost connection under the same name", options, async (t) => {
  const name = fresh("back");
  const client = openClient(t, name, { minReconnectionDelay: 50 });
  await client.ready;

  client.reconnect();
  await until("closed", () => !client.identified, (look) => {
    const timer = setInterval(look, 5);
    return () => clearInterval(timer);
  });
  await client.ready;

  assert.equal(client.name, name);
  assert.equal(await client.call("ping", ["back"]), "back");
});

test("AgentClient and useAgent reach a facet by a route of the service's own", options, async (t) => {
  const name = fresh("desk");
  const one = openClient(t, name, { basePath: `desk/${name}/sub/note/a%2Fb` });
  await one.ready;

  assert.equal(one.name, "a/b");
  assert.equal(one.agent, "note");
  assert.deepEqual(await one.call("where", []), [name, "a/b"]);

  const chain = [{ agent: "Note", name: "a/b" }, { agent: "Note", name: "below" }];
  const base = { agent: "Supervisor", name, host, basePath: `desk/${name}` };
  const two = mount(() => useAgent({ ...base, sub: chain.slice(0, 1), path: "leaf" }));
  t.after(two.unmount);
  await two.until("ready", (agent) => agent.identified);
  one.setState({ n: 7 });
  await two.until("the other's state", (agent) => agent.state?.n === 7);
  const three = mount(() => useAgent({ ...base, sub: chain }));
  t.after(three.unmount);
  await three.until("ready", (agent) => agent.identified);
  assert.deepEqual(await three.now().call("where", []), [name, "a/b", "below"]);
});

test("AgentClient stops for good at a route of the service's own as well", options, async (t) => {
  const name = fresh("nodesk");
  const client = openClient(t, name, { basePath: `desk/${name}/sub/worker/guessed` });
  const code = await new Promise((resolve) => client.addEventListener("close", (event) => resolve(event.code)));

  assert.equal(code, 4404);
});

test("AgentClient stops for good where there is no such agent", options, async (t) => {
  const refused = new Promise((resolve) => {
    openClient(t, fresh("none"), { agent: "no-such-class", onConnectionError: resolve });
  });

  const { code } = await refused;

  assert.ok(code >= 4000 && code <= 4499, `closed with ${code}`);
});

// -------------------------------------------------------------------- useAgentToolEvents

const useRuns = (name) => () => {
  const agent = useAgent({ agent: "Supervisor", name, host, minReconnectionDelay: 50 });
  return { agent, ...useAgentToolEvents({ agent }) };
};
const runsOf = ({ runsById }) => Object.values(runsById);
const textOf = ({ parts }) => parts.filter(({ type }) => type === "text").map(({ text }) => text).join("");
const picture = (value) => JSON.parse(JSON.stringify(value.runsById));
const allEnded = (count) => (value) =>
  runsOf(value).length === count && runsOf(value).every(({ status }) => status !== "running");

test("useAgentToolEvents shows runs grow live and end once", options, async (t) => {
  const tab = mount(useRuns(fresh("live")));
  t.after(tab.unmount);
  await tab.until("ready", ({ agent }) => agent.identified);

  const statuses = tab.now().agent.call("research", [3]);
  await tab.until("three runs at once", (value) => runsOf(value).length === 3);
  await tab.until("all three have ended", allEnded(3));

  assert.deepEqual(await statuses, ["completed", "completed", "completed"]);
  for (const { runId, status, agentType, subAgent } of runsOf(tab.now())) {
    assert.equal(status, "completed");
    assert.deepEqual(subAgent, { agent: agentType, name: runId });
    const lengths = tab.seen.map((value) => textOf(value.runsById[runId] ?? { parts: [] }).length);
    assert.deepEqual(lengths, [...lengths].sort((a, b) => a - b), "text only ever grows");
    assert.ok(new Set(lengths).size > 2, "text came in pieces");
  }
});

test("useAgentToolEvents: a tab that reconnects in mid-run and one that opens late see the same", options, async (t) => {
  const name = fresh("replay");
  const early = mount(useRuns(name));
  t.after(early.unmount);
  await early.until("ready", ({ agent }) => agent.identified);
  const caller = openClient(t, name);
  const statuses = caller.call("research", [3], { timeout: 0 });
  await early.until("runs are talking", (value) => runsOf(value).filter((run) => textOf(run)).length === 3);

  early.now().agent.reconnect();
  const late = mount(useRuns(name));
  t.after(late.unmount);
  await early.until("ended, seen by the old tab", allEnded(3));
  await late.until("ended, seen by the new tab", allEnded(3));
  await statuses;

  const after = mount(useRuns(name));
  t.after(after.unmount);
  await after.until("ended, seen from the replay alone", allEnded(3));
  assert.deepEqual(picture(early.now()), picture(after.now()));
  assert.deepEqual(picture(late.now()), picture(after.now()));
});

// -------------------------------------------------------------------------- useAgentChat

const useChat = (name, at = host) => () => {
  const agent = useAgent({ agent: "ChatBot", name, host: at, minReconnectionDelay: 50 });
  return { agent, ...useAgentChat({ agent }) };
};
const said = ({ messages }) => messages.map((message) => [message.role, textOf(message).trim()]);
const lastText = ({ messages }) => (messages.at(-1)?.role === "assistant" ? textOf(messages.at(-1)) : "");
const stored = async (name) => {
  const answer = await fetch(`${URL_GIVEN}/agents/chat-bot/${name}/get-messages`);
  assert.equal(answer.status, 200);
  return said({ messages: await answer.json() });
};

async function openChat(t, name, at = host) {
  const tab = mount(useChat(name, at));
  t.after(tab.unmount);
  await tab.until("ready", ({ agent, status }) => agent.identified && status === "ready");
  return tab;
}

test("useAgentChat sends, streams in pieces, and the server has stored the same", options, async (t) => {
  const name = fresh("send");
  const tab = await openChat(t, name);

  tab.now().sendMessage({ text: "go" });
  await tab.until("streaming", ({ status }) => status === "streaming");
  await tab.until("done", (value) => value.status === "ready" && lastText(value).trim() === REPLY);

  const expected = [["user", "go"], ["assistant", REPLY]];
  assert.deepEqual(said(tab.now()), expected);
  assert.deepEqual(await stored(name), expected);
  assert.ok(new Set(tab.seen.map((value) => lastText(value).length)).size > 3, "text came in pieces");
});

test("useAgentChat: a reload in mid-stream loses and doubles nothing", options, async (t) => {
  const name = fresh("reload");
  const first = await openChat(t, name);
  first.now().sendMessage({ text: "go" });
  await first.until("in mid-stream", (value) => lastText(value).includes("w5"));
  first.unmount();

  const second = mount(useChat(name));
  t.after(second.unmount);
  await second.until("streams on", (value) => ACTIVE.includes(value.status) && lastText(value).includes("w5"));
  await second.until("done", (value) => value.status === "ready" && lastText(value).trim() === REPLY);

  assert.deepEqual(said(second.now()), [["user", "go"], ["assistant", REPLY]]);
  assert.equal(second.now().messages.length, 2);
});

test("useAgentChat: a lost connection in mid-stream is taken up again", options, async (t) => {
  const name = fresh("drop");
  const tab = await openChat(t, name);
  tab.now().sendMessage({ text: "go" });
  await tab.until("in mid-stream", (value) => lastText(value).includes("w3"));

  tab.now().agent.reconnect();
  await tab.until("done", (value) => value.status === "ready" && lastText(value).trim() === REPLY);

  assert.deepEqual(said(tab.now()), [["user", "go"], ["assistant", REPLY]]);
});

test("useAgentChat: frames that come apart lose and double nothing", options, async (t) => {
  const name = fresh("apart");
  const at = await apart(t, host);
  const tab = await openChat(t, name, at); // and speaks while the server still greets it
  tab.now().sendMessage({ text: "go" });
  await tab.until("in mid-stream", (value) => lastText(value).includes("w3"));

  tab.now().agent.reconnect();
  await tab.until("taken up again", (value) => ACTIVE.includes(value.status) && lastText(value).includes("w9"));
  assert.deepEqual(said(tab.now())[0], ["user", "go"]);
  tab.unmount();
  const reloaded = mount(useChat(name, at));
  t.after(reloaded.unmount);
  await reloaded.until("done", (value) => value.status === "ready" && lastText(value).trim() === REPLY);

  assert.deepEqual(said(reloaded.now()), [["user", "go"], ["assistant", REPLY]]);
});

test("useAgentChat: a second tab sees the question and the answer as they come", options, async (t) => {
  const name = fresh("tabs");
  const [one, two] = [await openChat(t, name), await openChat(t, name)];

  one.now().sendMessage({ text: "go" });
  await two.until("the other tab streams", (value) => lastText(value).includes("w5"));
  await two.until("the other tab has it all", (value) => lastText(value).trim() === REPLY);
  await one.until("ready", ({ status }) => status === "ready");

  assert.deepEqual(said(two.now()), [["user", "go"], ["assistant", REPLY]]);
});

test("useAgentChat: stop ends the turn at the server, what was said stays, the next turn works", options, async (t) => {
  const name = fresh("stop");
  const tab = await openChat(t, name);
  tab.now().sendMessage({ text: "go" });
  await tab.until("in mid-stream", (value) => lastText(value).includes("w3"));

  tab.now().stop();
  await tab.until("ready", ({ status, isServerStreaming }) => status === "ready" && !isServerStreaming);
  tab.now().sendMessage({ text: "again" });
  await tab.until("the next answer is whole", (value) => value.status === "ready" && lastText(value).trim() === REPLY);

  const history = await stored(name);
  assert.deepEqual(history.map(([role]) => role), ["user", "assistant", "user", "assistant"]);
  const [, cut] = history[1];
  assert.ok(REPLY.startsWith(cut) && cut.length > 0 && cut.length < REPLY.length, `stored: ${cut}`);
  assert.equal(history[3][1], REPLY);
});

test("useAgentChat: clearing empties both tabs and the server", options, async (t) => {
  const name = fresh("clear");
  const [one, two] = [await openChat(t, name), await openChat(t, name)];
  one.now().sendMessage({ text: "go" });
  await one.until("done", (value) => value.status === "ready" && lastText(value).trim() === REPLY);
  // while that tab still takes the answer in, the published client would put it back
  await two.until("seen", (value) => !value.isServerStreaming && lastText(value).trim() === REPLY);

  one.now().clearHistory();
  await one.until("empty here", (value) => value.messages.length === 0);
  await two.until("empty there", (value) => value.messages.length === 0);

  assert.deepEqual(await stored(name), []);
});

test("useAgentChat: clearing in mid-stream leaves nothing to who watches, nor after a reload", options, async (t) => {
  const name = fresh("clear-mid");
  const [one, two, three] = [await openChat(t, name), await openChat(t, name), await openChat(t, name)];
  one.now().sendMessage({ text: "go" });
  await three.until("the other tab streams", (value) => lastText(value).includes("w3"));

  two.now().clearHistory();
  await three.until("empty where nobody did anything", (value) => value.messages.length === 0);
  await one.until("over where it was asked", ({ status }) => status === "ready");
  const later = await openChat(t, name);
  await new Promise((resolve) => setTimeout(resolve, 300)); // ten words more, if it went on

  assert.deepEqual([three, later].map((tab) => said(tab.now())), [[], []]);
  assert.deepEqual(await stored(name), []);
});

test("useAgentChat: a failure is shown live, after a reload and to a tab that comes back; the next turn works", options, async (t) => {
  const name = fresh("fail");
  const partial = "w0 w1 w2 w3 w4";
  const failed = (value) => value.status === "error" && value.error.message.includes("out of words");
  const [first, watching] = [await openChat(t, name), await openChat(t, name)];
  first.now().sendMessage({ text: "fail" });
  await first.until("it fails", failed);
  // the older generation drops what it has not shown when the error comes: on a busy machine a word
  const older = process.env.CULET_PACKAGES === "older";
  const [, [, live]] = said(first.now());
  assert.ok(older ? partial.startsWith(live) : live === partial, live);
  assert.deepEqual(said(first.now()), [["user", "fail"], ["assistant", live]]);
  await watching.until("the other tab has heard it", ({ isServerStreaming }) => !isServerStreaming);
  assert.deepEqual(said(watching.now()), [["user", "fail"], ["assistant", partial]]);

  const reloaded = mount(useChat(name));
  t.after(reloaded.unmount);
  await reloaded.until("the failure after a reload", failed);
  const kept = older ? "" : partial; // which empties a message that is replayed
  assert.deepEqual(said(reloaded.now()), [["user", "fail"], ["assistant", kept]]);

  first.now().agent.reconnect();
  await first.until("another connection", ({ agent }) => !agent.identified);
  await first.until("identified again", ({ agent }) => agent.identified);
  await first.until("the failure once more", failed);

  reloaded.now().sendMessage({ text: "go" });
  await reloaded.until("done", (value) => value.status === "ready" && lastText(value).trim() === REPLY);
  const expected = (text) => [["user", "fail"], ["assistant", text], ["user", "go"], ["assistant", REPLY]];
  assert.deepEqual(said(reloaded.now()), expected(kept));
  await watching.until("the other tab has it", (value) => lastText(value).trim() === REPLY);
  assert.deepEqual(said(watching.now()), expected(partial));
  assert.deepEqual(await stored(name), expected(partial));
  const after = await openChat(t, name);
  await after.until("no failure any more", (value) => value.status === "ready" && said(value).length === 4);
});
