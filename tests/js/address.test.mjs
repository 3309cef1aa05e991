// What the published client does by itself, without Culet: the addresses that it dials, and
// what it waits for. The numbers are those of docs/wire.md.
//
// CULET_KEBABS: {class name: the segment that Culet gives it}, from tests/web/test_clients.py.
import assert from "node:assert/strict";
import { test } from "node:test";

import { AgentClient, agentFetch } from "agents/client";
import WebSocket, { WebSocketServer } from "ws";

const KEBABS = JSON.parse(process.env.CULET_KEBABS ?? '{"MyAgent": "my-agent"}');

/** A WebSocket that never opens and keeps the address it was made for. */
class Dialled extends EventTarget {
  static CONNECTING = 0;
  static OPEN = 1;
  static CLOSING = 2;
  static CLOSED = 3;
  readyState = 0;

  constructor(url) {
    super();
    Dialled.told(new URL(url));
  }
  close() {}
  send() {}
}

/** Resolves to the address that a client with these options dials first. */
async function dialled(options) {
  const told = new Promise((resolve) => (Dialled.told = resolve));
  const client = new AgentClient({ host: "h.test:1", agent: "Desk", WebSocket: Dialled, ...options });
  const url = await told;
  client.close();
  return url;
}

test("W-002: the segment of a class is the one that the server gives it", async () => {
  for (const [name, segment] of Object.entries(KEBABS)) {
    const { pathname } = await dialled({ agent: name, name: "n" });
    assert.equal(pathname, `/agents/${segment}/n`, name);
  }
  assert.ok(Object.keys(KEBABS).length > 0);
});

test("W-003: a name stands in the path as it is, `default` where none is given", async () => {
  const paths = { "a b": "a%20b", "a/b": "a/b", "a%20b": "a%20b", "": "default", é: "%C3%A9", "a+b": "a+b" };
  for (const [name, raw] of Object.entries(paths)) {
    assert.equal((await dialled({ name })).pathname, `/agents/desk/${raw}`, name);
  }
  assert.equal((await dialled({ name: "a?b" })).pathname, "/agents/desk/a", "what follows is the query");
});

test("W-003: prefix, path and base path", async () => {
  assert.equal((await dialled({ name: "n", prefix: "api/v1/agents" })).pathname, "/api/v1/agents/desk/n");
  assert.equal((await dialled({ name: "n", path: "sub/note/a%2Fb" })).pathname, "/agents/desk/n/sub/note/a%2Fb");
  assert.equal((await dialled({ name: "n", basePath: "my/desk" })).pathname, "/my/desk");
});

test("W-003: a host that is not plainly local is dialled with TLS", async () => {
  const schemes = {
    "h.test:80": "wss:", "http://h.test": "wss:", localhost: "wss:",
    "localhost:8787": "ws:", "127.0.0.1:8787": "ws:", "192.168.0.7": "ws:", "10.0.0.1": "ws:", "172.16.0.1": "ws:",
  };
  for (const [host, scheme] of Object.entries(schemes)) {
    assert.equal((await dialled({ host })).protocol, scheme, host);
  }
  assert.equal((await dialled({ host: "h.test", protocol: "ws" })).protocol, "ws:");
});

test("W-012: the label is the first parameter, the query follows it", async () => {
  const url = await dialled({ query: { token: "a b", none: null, missing: undefined, n: 1 }, id: "mine" });
  assert.equal(url.search, "?_pk=mine&token=a+b&n=1");
  const [one, two] = [await dialled({}), await dialled({})];
  const label = /^\?_pk=[0-9a-f-]{36}$/;
  assert.match(one.search, label);
  assert.notEqual(one.search, two.search);
});

test("W-011: a request without parameters ends in a question mark", async (t) => {
  const asked = [];
  const fetch = async (url) => {
    asked.push(String(url));
    return new Response("");
  };
  t.mock.method(globalThis, "fetch", fetch);
  await agentFetch({ host: "h.test", agent: "Desk", name: "n" });
  assert.deepEqual(asked, ["https://h.test/agents/desk/n?"]);
});

test("W-043: who is told that a state follows is not ready without it; the older client does not ask", async (t) => {
  const server = new WebSocketServer({ port: 0, host: "127.0.0.1" });
  await new Promise((resolve) => server.once("listening", resolve));
  const say = (socket, frame) => socket.send(JSON.stringify(frame));
  const met = new Promise((resolve) => server.once("connection", resolve));
  const client = new AgentClient({ agent: "Desk", name: "n", host: `127.0.0.1:${server.address().port}`, WebSocket });
  t.after(() => {
    client.close();
    server.close();
  });
  let ready = false;
  client.ready.then(() => (ready = true));
  const socket = await met;
  const heard = new Promise((resolve) => client.addEventListener("message", ({ data }) => data === "sync" && resolve()));
  say(socket, { type: "cf_agent_identity", name: "n", agent: "desk", stateFollows: true });
  socket.send("sync");
  await heard;
  await new Promise((resolve) => setTimeout(resolve));

  assert.equal(ready, process.env.CULET_PACKAGES === "older");
  say(socket, { type: "cf_agent_state", state: 1 });
  await client.ready;
  assert.equal(client.state === 1 || process.env.CULET_PACKAGES === "older", true);
});
