// The published chat client runs tools of its own and approves calls, at CULET_URL (server.py).
//
// Clerk calls each tool whose name it is told, `pay` (needs approval), `where` (the client's)
// or one that the client declares; then it says how often it has paid, and all the results.
import assert from "node:assert/strict";
import { after, test } from "node:test";

import { closeDocument, mount } from "./hooks.mjs"; // first: it makes the document

import { useAgent } from "agents/react";
import { useAgentChat } from "@cloudflare/ai-chat/react";

const URL_GIVEN = process.env.CULET_URL;
const host = URL_GIVEN ? new URL(URL_GIVEN).host : "";
const options = { skip: URL_GIVEN ? false : "CULET_URL is not set", timeout: 60_000 };
const fresh = (name) => `${name}-${crypto.randomUUID().slice(0, 8)}`;

after(closeDocument);

test("the packages are of the generation that is asked for", () => {
  const older = new URL("./older/", import.meta.url).href;
  const found = import.meta.resolve("@cloudflare/ai-chat/react");
  assert.equal(found.startsWith(older), process.env.CULET_PACKAGES === "older", found);
});

async function openChat(t, name, more = {}) {
  const tab = mount(() => {
    const agent = useAgent({ agent: "Clerk", name, host, minReconnectionDelay: 50 });
    return { agent, ...useAgentChat({ agent, ...more }) };
  });
  t.after(tab.unmount);
  await tab.until("ready", ({ agent, status }) => agent.identified && status === "ready");
  return tab;
}

const textOf = (message) =>
  message.parts.filter(({ type }) => type === "text").map(({ text }) => text).join("");
const lastText = ({ messages }) => (messages.at(-1)?.role === "assistant" ? textOf(messages.at(-1)) : "");
const calls = ({ messages }) =>
  messages.flatMap(({ parts }) => parts).filter((part) => "toolCallId" in part);
const states = (value) => calls(value).map(({ state }) => state);
const idle = ({ status, isServerStreaming }) => status === "ready" && !isServerStreaming;
const says = (text) => (value) => idle(value) && lastText(value) === text;
const stored = async (name) => {
  const answer = await fetch(`${URL_GIVEN}/agents/clerk/${name}/get-messages`);
  assert.equal(answer.status, 200);
  return answer.json();
};
const neverFailed = (tab) =>
  assert.deepEqual(tab.seen.filter(({ status, error }) => status === "error" || error), []);

/** What is shown is what is stored, one answer to one question, whole. */
async function settled(name, tab, text) {
  neverFailed(tab);
  assert.deepEqual(tab.now().messages.map(({ role }) => role), ["user", "assistant"]);
  const messages = await stored(name);
  assert.deepEqual(messages.map(({ role }) => role), ["user", "assistant"]);
  assert.equal(textOf(messages[1]), text);
  assert.deepEqual(states({ messages }), states(tab.now()));
}

test("a tool of the client's runs there, and the answer goes on in the same message", options, async (t) => {
  const name = fresh("client");
  const ran = [];
  const onToolCall = async ({ toolCall, addToolOutput }) => {
    ran.push(toolCall.toolName);
    addToolOutput({ toolCallId: toolCall.toolCallId, output: "at home" });
  };
  const [tab, other] = [await openChat(t, name, { onToolCall }), await openChat(t, name)];

  tab.now().sendMessage({ text: "where" });
  const text = "paid 0 times; at home";
  await tab.until("the answer", says(text));
  await other.until("the answer in the other tab", says(text));

  assert.deepEqual(ran, ["where"]);
  assert.deepEqual(states(tab.now()), ["output-available"]);
  await settled(name, tab, text);
  await settled(name, other, text);
});

test("a tool that only the client knows is declared with the question", options, async (t) => {
  const name = fresh("declared");
  const parameters = { type: "object", properties: {} };
  const tools = { look: { description: "Look.", parameters, execute: () => {} } }; // else it is not declared
  const onToolCall = ({ toolCall, addToolOutput }) =>
    addToolOutput({ toolCallId: toolCall.toolCallId, output: { seen: 3 } });
  const tab = await openChat(t, name, { tools, onToolCall });

  tab.now().sendMessage({ text: "look where" });
  const text = 'paid 0 times; {"seen":3}; {"seen":3}';
  await tab.until("the answer", says(text));

  await settled(name, tab, text);
});

test("the first of two decisions stands, and every tab sees how it goes", options, async (t) => {
  const name = fresh("approve");
  const [tab, other] = [await openChat(t, name), await openChat(t, name)];
  tab.now().sendMessage({ text: "pay" });
  const asked = (value) => idle(value) && states(value).join() === "approval-requested";
  await tab.until("asked", asked);
  await other.until("asked", asked);
  assert.deepEqual(states({ messages: await stored(name) }), ["approval-requested"]);

  const { id } = calls(tab.now())[0].approval;
  tab.now().addToolApprovalResponse({ id, approved: true });
  other.now().addToolApprovalResponse({ id, approved: false }); // which comes first?
  const ends = {
    "paid 1 times; paid": "output-available",
    "paid 0 times; error: a person refused this tool call": "output-denied",
  };
  const said = (value) => Object.keys(ends).find((text) => says(text)(value));
  await tab.until("the answer", (value) => said(value) !== undefined);
  const text = said(tab.now());
  await other.until("the same answer in the other tab", says(text));

  await settled(name, tab, text);
  await settled(name, other, text);
  assert.deepEqual(states(tab.now()), [ends[text]]);
  assert.deepEqual(states(other.now()), [ends[text]]);
});

test("an approved call runs once", options, async (t) => {
  const name = fresh("approved");
  const tab = await openChat(t, name);
  tab.now().sendMessage({ text: "pay" });
  await tab.until("asked", (value) => idle(value) && states(value).join() === "approval-requested");

  tab.now().addToolApprovalResponse({ id: calls(tab.now())[0].approval.id, approved: true });
  const text = "paid 1 times; paid";
  await tab.until("the answer", says(text));

  await settled(name, tab, text);
  assert.deepEqual(states(tab.now()), ["output-available"]);
});

test("a denied call does not run, and the model is told", options, async (t) => {
  const name = fresh("deny");
  const tab = await openChat(t, name);
  tab.now().sendMessage({ text: "pay" });
  await tab.until("asked", (value) => idle(value) && states(value).join() === "approval-requested");

  tab.now().addToolApprovalResponse({ id: calls(tab.now())[0].approval.id, approved: false });
  const text = "paid 0 times; error: a person refused this tool call";
  await tab.until("the answer", says(text));

  await settled(name, tab, text);
  assert.deepEqual(states(tab.now()), ["output-denied"]);
});

test("after a reload the question for approval is still there and can be answered", options, async (t) => {
  const name = fresh("reload");
  const first = await openChat(t, name);
  first.now().sendMessage({ text: "pay where" });
  await first.until("asked", (value) => idle(value) && states(value).length === 2);
  first.unmount();

  const tab = await openChat(t, name);
  await tab.until("still asked", (value) => states(value).join() === "approval-requested,input-available");
  tab.now().addToolApprovalResponse({ id: calls(tab.now())[0].approval.id, approved: true });
  await tab.until("approved", (value) => states(value)[0] === "approval-responded");
  const [, where] = calls(tab.now());
  tab.now().addToolOutput({ toolCallId: where.toolCallId, toolName: "where", output: "away" });
  const text = "paid 1 times; paid; away";
  await tab.until("the answer", says(text));

  await settled(name, tab, text);
});

test("the next question works after all that", options, async (t) => {
  const name = fresh("next");
  const tab = await openChat(t, name);
  for (const round of [1, 2]) {
    tab.now().sendMessage({ text: "pay" });
    await tab.until("asked", (value) => idle(value) && states(value).at(-1) === "approval-requested");
    tab.now().addToolApprovalResponse({ id: calls(tab.now()).at(-1).approval.id, approved: true });
    await tab.until("the answer", (value) => idle(value) && lastText(value).startsWith(`paid ${round} times`));
  }

  neverFailed(tab);
  assert.deepEqual((await stored(name)).map(({ role }) => role), ["user", "assistant", "user", "assistant"]);
});
