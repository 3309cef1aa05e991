// The published hooks, what the other file leaves: `useAgent` whole, reports, slow beginnings.
//
// CULET_URL=http://127.0.0.1:8787 node --test hooks.test.mjs (the server: server.py)
import assert from "node:assert/strict";
import { after, test } from "node:test";

import { closeDocument, mount } from "./hooks.mjs"; // first: it makes the document

import { useAgent, useAgentToolEvents } from "agents/react";
import { useAgentChat } from "@cloudflare/ai-chat/react";

const URL_GIVEN = process.env.CULET_URL;
const host = URL_GIVEN ? new URL(URL_GIVEN).host : "";
const options = { skip: URL_GIVEN ? false : "CULET_URL is not set", timeout: 60_000 };
const fresh = (name) => `${name}-${crypto.randomUUID().slice(0, 8)}`;

after(closeDocument);

async function tabOf(t, useIt) {
  const tab = mount(useIt);
  t.after(tab.unmount);
  await tab.until("ready", ({ agent }) => agent.identified);
  return tab;
}
const useDesk = (name, more = {}) => () => {
  const agent = useAgent({ agent: "Supervisor", name, host, minReconnectionDelay: 50, ...more });
  return { agent, ...useAgentToolEvents({ agent }) };
};
const textOf = ({ parts }) => parts.filter(({ type }) => type === "text").map(({ text }) => text).join("");

test("useAgent has the state of the agent, and two tabs have the same", options, async (t) => {
  const name = fresh("state");
  const told = [];
  const one = await tabOf(t, useDesk(name, { onStateUpdate: (state, source) => told.push([state, source]) }));
  const two = await tabOf(t, useDesk(name));
  assert.deepEqual(one.now().agent.state, { n: 0 });

  two.now().agent.setState({ n: 5 });
  await one.until("the other's state", ({ agent }) => agent.state?.n === 5);

  assert.deepEqual(told.at(-1), [{ n: 5 }, "server"]);
  const three = await tabOf(t, useDesk(name));
  assert.deepEqual(three.now().agent.state, { n: 5 });
});

test("useAgent calls, streams and is told of failures without the words of the house", options, async (t) => {
  const tab = await tabOf(t, useDesk(fresh("call")));
  const { agent } = tab.now();
  const chunks = [];

  assert.equal(await agent.call("ping", ["hi"]), "hi");
  assert.equal(await agent.stub.ping("stub"), "stub");
  assert.equal(await agent.call("count", [3], { onChunk: (chunk) => chunks.push(chunk) }), 3);
  assert.deepEqual(chunks, [0, 1, 2]);
  const failure = await agent.call("fail", []).then(() => assert.fail("it has failed"), (error) => error);
  assert.match(failure.message ?? String(failure), /error \w+/);
  assert.doesNotMatch(failure.message ?? String(failure), /house/);
});

test("useAgent asks for its query before it connects", options, async (t) => {
  let asked = 0;
  const query = async () => {
    asked += 1;
    return { token: "t" };
  };
  const tab = await tabOf(t, useDesk(fresh("query"), { query, queryDeps: [] }));

  assert.equal(await tab.now().agent.call("ping", ["in"]), "in");
  assert.ok(asked >= 1);
});

test("useAgentToolEvents shows siblings in their order, progress live and milestones for good", options, async (t) => {
  const name = fresh("climb");
  const tab = await tabOf(t, useDesk(name));
  const [siblings, climbed] = [tab.now().agent.call("research", [3]), tab.now().agent.call("climb", [])];
  await tab.until("progress", ({ getRunsForToolCall }) => getRunsForToolCall("call-2")[0]?.progress?.fraction > 0);
  await tab.until("the camp", ({ getRunsForToolCall }) => getRunsForToolCall("call-2")[0]?.milestones?.length === 1);
  await tab.until("all over", ({ runsById }) =>
    Object.values(runsById).length === 4 && Object.values(runsById).every(({ status }) => status === "completed"));

  assert.deepEqual([await siblings, await climbed], [["completed", "completed", "completed"], "completed"]);
  assert.deepEqual(tab.now().getRunsForToolCall("call-1").map(({ order }) => order), [0, 1, 2]);
  const [climb] = tab.now().getRunsForToolCall("call-2");
  assert.equal(climb.milestones[0].name, "camp");
  assert.deepEqual(climb.milestones[0].data, { metres: 4800 });
  assert.equal(textOf(climb), "0 1 2 3 there");
  const late = await tabOf(t, useDesk(name));
  await late.until("the same", ({ runsById }) => Object.values(runsById).length === 4
    && Object.values(runsById).every(({ status }) => status === "completed"));
  assert.deepEqual(late.now().getRunsForToolCall("call-2")[0].milestones, climb.milestones);
  assert.equal(textOf(late.now().getRunsForToolCall("call-2")[0]), textOf(climb));
});

test("useAgentChat: an answer whose first word is late is shown, also to a tab that opens meanwhile", options, async (t) => {
  const name = fresh("slow");
  const useSlow = () => {
    const agent = useAgent({ agent: "Slow", name, host, minReconnectionDelay: 50 });
    return { agent, ...useAgentChat({ agent }) };
  };
  const whole = Array.from({ length: 40 }, (_, at) => `w${at}`).join(" ");
  const done = ({ messages }) => messages.at(-1)?.role === "assistant" && textOf(messages.at(-1)) === whole;
  const tab = await tabOf(t, useSlow);
  await tab.until("idle", ({ status }) => status === "ready");
  tab.now().sendMessage({ text: "hi" });
  await tab.until("asked", ({ messages }) => messages.length > 0);
  const late = await tabOf(t, useSlow);

  await tab.until("the answer", done);
  await late.until("the answer in the tab that came late", done);

  assert.equal(tab.seen.some(({ status }) => status === "error"), false);
  assert.deepEqual(late.now().messages.map(({ role }) => role), ["user", "assistant"]);
});
