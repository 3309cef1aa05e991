// Our client behind a proxy that cuts: what it has at the end is what was said, once.
//
// CULET_URL=http://127.0.0.1:PORT CULET_WHAT=run|chat|http CULET_SIZE=CHUNKS node cuts.mjs
// (the proxy and what is behind it: tests/web/cutting.py)
import assert from "node:assert/strict";

import WebSocket from "ws";

import { AgentClient } from "culet";
import { askOverHttp } from "culet/http";

const { CULET_URL: host, CULET_WHAT: what, CULET_SIZE: size } = process.env;
const words = Array.from({ length: Number(size) }, (_, at) => `${at} `);
const textOf = ({ parts }) => parts.filter(({ type }) => type === "text").map(({ text }) => text).join("");

/** A client that tries again at once. */
function hasty(agent, name, options) {
  const client = new AgentClient({ agent, name, host }, { WebSocket, chance: () => 0, ...options });
  client.subscribe(({ link }) => link.kind === "waiting" && queueMicrotask(() => client.retry()));
  return client;
}

const proofs = {
  async run() {
    const client = hasty("Desk", "d");
    const heard = [];
    client.addEventListener("message", ({ data }) => {
      const frame = JSON.parse(data);
      if (frame.type === "agent-tool-event") heard.push(frame.sequence);
    });
    const { runs } = await client.until(({ runs }) => runs.runsById.r?.status === "completed");
    assert.ok(heard.length === words.length + 2 && heard.every((number, at) => number === at), `each once: ${heard.length}`);
    assert.ok(textOf(runs.runsById.r) === words.join(""), "its text is whole");
    client.close();
  },
  async chat() {
    const client = hasty("Bot", "b", { chat: true });
    const { outcome, message } = await client.ask(size).done;
    assert.equal(outcome, "completed");
    assert.ok(textOf(message) === words.join(""), "each word once, in order");
    assert.deepEqual(client.messages.map(({ role }) => role), ["user", "assistant"]);
    client.close();
  },
  async http() {
    const answer = await askOverHttp({ agent: "Bot", name: "b", host }, size, { chance: () => -2 });
    console.log("taken");
    const heard = [];
    for await (const { type, delta } of answer) if (type === "text-delta") heard.push(delta);
    assert.ok(heard.join("") === words.join("") && answer.text === words.join(""), "each word once, in order");
    assert.equal(answer.outcome, "completed");
  },
};

await proofs[what]();
