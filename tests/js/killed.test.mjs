// The published hooks while their server is killed and started anew: nothing lost, nothing twice.
//
// CULET_PYTHON=python node --test killed.test.mjs (it starts server.py itself)
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import net from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, test } from "node:test";

import { closeDocument, mount } from "./hooks.mjs"; // first: it makes the document

import { useAgent, useAgentToolEvents } from "agents/react";
import { useAgentChat } from "@cloudflare/ai-chat/react";

const PYTHON = process.env.CULET_PYTHON ?? "";
const options = { skip: PYTHON ? false : "CULET_PYTHON is not set", timeout: 120_000 };
const REPLY = Array.from({ length: 40 }, (_, at) => `w${at}`).join(" ");
const QUICK = { minReconnectionDelay: 50, maxReconnectionDelay: 200 };

after(closeDocument);

/** A server that can be killed; its address stays, whatever process is behind it. */
async function mortal(t) {
  const data = mkdtempSync(join(tmpdir(), "culet-js-"));
  const open = new Set();
  let child = null;
  let port = 0;
  const start = async () => {
    child = spawn(PYTHON, ["server.py", "--data", data], { stdio: ["ignore", "pipe", "ignore"] });
    const [line] = await new Promise((resolve) => child.stdout.once("data", (text) => resolve(`${text}`.split("\n"))));
    port = Number(new URL(line).port);
  };
  const kill = async () => {
    const gone = new Promise((resolve) => child.once("exit", resolve));
    child.kill("SIGKILL");
    port = 0;
    for (const socket of open) socket.destroy();
    await gone;
  };
  const server = net.createServer((near) => {
    if (!port) return near.destroy();
    const far = net.connect({ host: "127.0.0.1", port, noDelay: true });
    for (const [one, other] of [[near, far], [far, near]]) {
      open.add(one);
      one.on("error", () => other.destroy());
      one.on("close", () => {
        open.delete(one);
        other.destroy();
      });
      one.pipe(other);
    }
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  t.after(async () => {
    server.close();
    await kill();
    rmSync(data, { recursive: true, force: true });
  });
  await start();
  return { host: `127.0.0.1:${server.address().port}`, kill, start };
}
const textOf = ({ parts }) => parts.filter(({ type }) => type === "text").map(({ text }) => text).join("");
const lastText = ({ messages }) => (messages.at(-1)?.role === "assistant" ? textOf(messages.at(-1)) : "");

test("W-140 W-209: an answer and a run go on when their server was killed, in the tab that is open", options, async (t) => {
  const server = await mortal(t);
  const { host } = server;
  const chat = mount(() => {
    const agent = useAgent({ agent: "ChatBot", name: "c", host, ...QUICK });
    return { agent, ...useAgentChat({ agent }) };
  });
  const desk = mount(() => {
    const agent = useAgent({ agent: "Supervisor", name: "d", host, ...QUICK });
    return { agent, ...useAgentToolEvents({ agent }) };
  });
  t.after(chat.unmount);
  t.after(desk.unmount);
  await chat.until("ready", ({ agent, status }) => agent.identified && status === "ready");
  await desk.until("ready", ({ agent }) => agent.identified);
  const run = ({ runsById }) => Object.values(runsById)[0] ?? { parts: [] };

  chat.now().sendMessage({ text: "go" });
  desk.now().agent.call("talk", []).catch(() => undefined); // the call is lost with its socket
  for (const word of ["w5", "w15"]) {
    await chat.until(word, (value) => lastText(value).includes(word));
    await desk.until(word, (value) => textOf(run(value)).includes(word));
    await server.kill();
    await chat.until("gone", ({ agent }) => !agent.identified);
    await server.start();
    await chat.until("back", ({ agent }) => agent.identified);
  }

  await chat.until("the answer", (value) => value.status === "ready" && lastText(value) === REPLY);
  await desk.until("the end of the run", (value) => run(value).status === "completed");
  assert.deepEqual(chat.now().messages.map(({ role }) => role), ["user", "assistant"]);
  assert.equal(textOf(run(desk.now())), REPLY);
  const messages = await (await fetch(`http://${host}/agents/chat-bot/c/get-messages`)).json();
  assert.deepEqual(messages.map(textOf), ["go", REPLY]);
});
