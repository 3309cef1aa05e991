// Ids are any text. Whatever they are called, everything is as it is with plain names, and
// what others say is shown as text.
import assert from "node:assert/strict";
import { after, test } from "node:test";

import { closeDocument, mount, mountNode } from "./hooks.mjs"; // first: it makes the document

import React from "react";

import { callsOfRuns, applyAgentToolEvents, emptyState, runsOf } from "culet";
import { applyChatFrame, ask, emptyChat } from "culet/chat";
import { useAgentToolEvents } from "culet/react";

const { MessageView } = await import("../../web/culet/web/demo/static/message.js");
const { AsksView } = await import("../../web/culet/web/demo/static/asks.js");
const { TABS } = await import("../../web/culet/web/inspect/static/views.js");

after(closeDocument);

const NAMES = ["__proto__", "constructor", "toString", "hasOwnProperty", "valueOf", "length", "then"];
const PLAIN = "plain";

const frames = (name) => {
  const frame = (sequence, more) => ({
    type: "agent-tool-event",
    parentToolCallId: name,
    sequence,
    event: { runId: name, agentType: name, order: 0, ...more },
  });
  const call = { runId: name, toolCallId: name, toolName: name, state: "approval-requested", input: { [name]: name } };
  const bodies = [
    { type: "tool-input-available", toolCallId: name, toolName: name, input: { [name]: 1 } },
    { type: `data-${name}`, id: name, data: { [name]: 1 } },
    { type: `data-${name}`, id: name, data: { [name]: 2 } },
    { type: "data-agent-progress", id: name, data: { phase: "waiting", data: { calls: [call] } } },
    { type: "data-agent-milestone", data: { name, sequence: 1, at: 1 } },
    { type: "tool-output-available", toolCallId: name, output: { [name]: name } },
  ];
  const chunk = (body, at) => frame(at + 1, { kind: "chunk", body: JSON.stringify(body) });
  return [frame(0, { kind: "started" }), ...bodies.map(chunk)];
};

/** What a state shows, each table as its entries: so `__proto__` is seen. */
const pictureOf = (state) => JSON.stringify([Object.entries(state.runsById), Object.entries(state.runsByToolCallId), state.unboundRuns, callsOfRuns(state)]);

test("runs, their calls, data and reports are folded the same whatever they are called", () => {
  const plain = pictureOf(applyAgentToolEvents(emptyState(), frames(PLAIN)));
  assert.match(plain, /"approval-requested"/);
  for (const name of NAMES) {
    const state = applyAgentToolEvents(emptyState(), frames(name));
    assert.equal(pictureOf(state), plain.replaceAll(PLAIN, name));
    assert.equal(applyAgentToolEvents(state, frames(name)), state, "again, nothing changes");
    assert.deepEqual([runsOf(state, name).length, runsOf(emptyState(), name)], [1, []]);
    const gone = applyAgentToolEvents(state, [{ type: "agent-tool-event", sequence: 9, event: { kind: "cleared", runIds: [name] } }]);
    assert.equal(pictureOf(gone), pictureOf(emptyState()));
  }
  assert.equal({}.polluted ?? Object.keys(Object.prototype).length, 0);
});

test("all of these at once are kept apart", () => {
  const state = applyAgentToolEvents(emptyState(), NAMES.flatMap(frames));
  for (const name of NAMES) {
    assert.equal(state.runsById[name].runId, name);
    assert.deepEqual(runsOf(state, name).map(({ runId }) => runId), [name]);
  }
  assert.equal(callsOfRuns(state).length, NAMES.length);
});

test("a chat is folded the same whatever its turns and messages are called", () => {
  const chat = (name) => {
    const question = { id: `q ${name}`, role: "user", parts: [{ type: "text", text: "hi" }] };
    const say = (seq, body, more) => ({ type: "cf_agent_use_chat_response", id: name, seq, body: JSON.stringify(body), ...more });
    const told = [
      say(0, { type: "start", messageId: name }),
      say(1, { type: "tool-input-available", toolCallId: name, toolName: name, input: { [name]: 1 } }),
      say(2, { type: `data-${name}`, id: name, data: name }),
      say(3, { type: "error", errorText: name }, { done: true, outcome: "error" }),
    ];
    const asked = ask(emptyChat(), { id: name, message: question });
    const end = [...told, ...told].reduce((now, frame) => applyChatFrame(now, frame), asked);
    return JSON.stringify({ ...end, notes: [...end.notes], touched: [...end.touched] });
  };
  for (const name of NAMES) assert.equal(chat(name), chat(PLAIN).replaceAll(PLAIN, name));
});

test("the hook shows them, and nothing else", async (t) => {
  const socket = new EventTarget();
  const tab = mount(() => useAgentToolEvents({ agent: socket }));
  t.after(tab.unmount);
  await tab.until("mounted", () => true);

  for (const frame of [...NAMES.flatMap(frames), { type: "__proto__" }, null]) {
    socket.dispatchEvent(new MessageEvent("message", { data: JSON.stringify(frame) }));
  }
  await tab.until("all", ({ waitingCalls }) => waitingCalls.length === NAMES.length);

  const { runsById, getRunsForToolCall, waitingCalls } = tab.now();
  assert.deepEqual(Object.keys(runsById).sort(), [...NAMES].sort());
  for (const name of NAMES) assert.deepEqual(getRunsForToolCall(name).map(({ runId }) => runId), [name]);
  assert.deepEqual(getRunsForToolCall("isPrototypeOf"), []);
  const shown = mountNode(t, React.createElement("ul", null, waitingCalls.map(({ runId, toolName }) => React.createElement("li", { key: runId }, toolName))));
  await new Promise((resolve) => setTimeout(resolve, 50));
  assert.deepEqual([...shown.querySelectorAll("li")].map((item) => item.textContent), NAMES);
});

const TAG = '<img src=x onerror="globalThis.pwned = 1"><script>globalThis.pwned = 1</script>';

test("the page shows what models, tools and runs say as text", () => {
  for (const name of [...NAMES, TAG]) {
    const runs = applyAgentToolEvents(emptyState(), frames(name));
    const tool = { type: `tool-${name}`, toolCallId: `other ${name}`, toolName: name, state: name, input: { question: name }, errorText: name };
    const message = { id: name, role: "assistant", parts: [{ type: "text", text: name }, tool, { ...tool, toolCallId: name }] };
    const view = new MessageView("assistant");

    view.update(message, { runs, hrefOf: () => "/", note: { kind: name, text: name }, busy: "" });

    const { node } = view;
    document.body.append(node);
    assert.equal(node.querySelectorAll("img, script").length, 0);
    assert.equal(node.querySelector(".tool-state").textContent, name, "a state of an unknown name is told by its name");
    assert.equal(node.querySelector(".tool-name").textContent, name);
    assert.equal(node.querySelector(".panel").dataset.run, name);
    assert.equal(node.querySelector(".note").textContent, name);
    assert.doesNotMatch(node.textContent, /native code|\[object/);
    node.remove();
  }
  assert.equal(globalThis.pwned, undefined);
});

test("so does what asks a person, and his answer goes to the one he was asked by", async () => {
  const said = [];
  const asks = new AsksView(async (call, approved) => said.push([call.runId, call.toolCallId, approved]));
  const names = [...NAMES, TAG];
  const call = (name) => ({ runId: name, toolCallId: name, toolName: name, state: "approval-requested", input: { question: name } });

  asks.update([...names.map(call), { ...call("result"), state: "input-available" }]);

  assert.equal(asks.node.querySelectorAll("img, script").length, 0);
  const lines = [...asks.node.children];
  assert.deepEqual(lines.map((line) => line.querySelector(".ask-about").textContent), names);
  for (const line of lines) line.querySelector(".quiet").click();
  await new Promise((resolve) => setTimeout(resolve, 0));
  assert.deepEqual(said, names.map((name) => [name, name, false]));
  asks.update([]);
  assert.equal(asks.node.hidden, true);
});

test("so does the inspector, in each of its tabs", () => {
  const page = { now: 10, window: { from: 0, to: 10 }, ask() {} };
  for (const name of [...NAMES, TAG]) {
    const item = new Proxy({}, {
      get: (_, key) => (/_at$|^(n|at|bytes|runs|sockets|jobs|refs|attempts?|elapsed_s|chunks|number|id)$/.test(key) ? 1 : key === "acts" ? [] : name),
      ownKeys: () => ["channel", "extra"],
      getOwnPropertyDescriptor: () => ({ enumerable: true, configurable: true }),
    });
    for (const [tab, { make }] of Object.entries(TABS)) {
      const view = make(page);
      view.update(item);
      document.body.append(view.node);
      assert.equal(view.node.querySelectorAll("img, script").length, 0, tab);
      assert.ok(view.node.textContent.includes(name), `${tab} of ${name}`);
      assert.doesNotMatch(view.node.textContent, /native code|\[object/, `${tab} of ${name}`);
      view.node.remove();
    }
  }
  assert.equal(globalThis.pwned, undefined);
});
