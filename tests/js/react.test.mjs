// The hooks by themselves: on a server, under StrictMode, and when the agent is another one.
import assert from "node:assert/strict";
import { after, test } from "node:test";

import { closeDocument, mount, mountNode, until, watched } from "./hooks.mjs"; // first: it makes the document

import { StrictMode, createElement, useState } from "react";

import { useAgentClient, useAgentToolEvents } from "culet/react";

const { renderToString } = await import("react-dom/server");

after(closeDocument);

/** Sockets that open at once and never say anything unless they are told to. */
class Wire extends EventTarget {
  static made = [];
  readyState = 0;

  constructor(url) {
    super();
    this.url = new URL(url);
    Wire.made.push(this);
    queueMicrotask(() => {
      if (this.readyState !== 0) return;
      this.readyState = 1;
      this.dispatchEvent(new Event("open"));
    });
  }

  say(frame) {
    this.dispatchEvent(new MessageEvent("message", { data: JSON.stringify(frame) }));
  }

  send() {}

  close() {
    this.readyState = 3;
  }
}
const started = (runId) => ({ type: "agent-tool-event", sequence: 0, event: { kind: "started", runId, agentType: "A", order: 0 } });
const place = (name) => ({ agent: "Desk", name, host: "http://a" });
const open = () => Wire.made.filter(({ readyState }) => readyState === 1).map(({ url }) => url.pathname);

test("on a server the hooks render what is known: nothing", () => {
  Wire.made = [];
  function Page() {
    const { client, link, state } = useAgentClient(place("a"), { WebSocket: Wire });
    const { unboundRuns } = useAgentToolEvents({ agent: client });
    return createElement("p", null, `${link.kind} ${state} ${unboundRuns.length}`);
  }
  assert.equal(renderToString(createElement(Page)), "<p>connecting undefined 0</p>");
  assert.deepEqual(Wire.made, []);
});

test("under StrictMode one socket stays open, and none after the page is left", async (t) => {
  Wire.made = [];
  function Page() {
    const { link } = useAgentClient(place("a"), { WebSocket: Wire });
    return createElement("p", null, link.kind);
  }
  const left = [];
  const node = mountNode({ after: (leave) => left.push(leave) }, createElement(StrictMode, null, createElement(Page)));
  await until("open", () => node.textContent === "open", watched(node));
  assert.deepEqual(open(), ["/agents/desk/a"]);
  left[0]();
  await new Promise((resolve) => setTimeout(resolve, 20));
  assert.deepEqual(open(), []);
});

test("another agent's runs are not those of the one before", async (t) => {
  Wire.made = [];
  let turnTo;
  const tab = mount(() => {
    const [name, setName] = useState("a");
    turnTo = setName;
    const { client, link } = useAgentClient(place(name), { WebSocket: Wire });
    return { link, runs: Object.keys(useAgentToolEvents({ agent: client }).runsById) };
  });
  t.after(tab.unmount);
  await tab.until("open", ({ link }) => link.kind === "open");
  Wire.made[0].say(started("of a"));
  await tab.until("a's", ({ runs }) => runs.length === 1);

  turnTo("b");
  await tab.until("nothing", ({ runs }) => runs.length === 0);
  assert.deepEqual(open(), ["/agents/desk/b"]);
  Wire.made[1].say(started("of b"));
  await tab.until("b's", ({ runs }) => runs.length === 1);
  assert.deepEqual(tab.now().runs, ["of b"]);
});
