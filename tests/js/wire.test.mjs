// What the published client does with what it is sent, against the real server: the statements
// of docs/wire.md that are about the reaction of a client. The numbers are those of the rules.
//
// CULET_URL=http://127.0.0.1:8787 node --test wire.test.mjs (the server: server.py)
import assert from "node:assert/strict";
import { test } from "node:test";

import { AgentClient } from "agents/client";
import WebSocket from "ws";

const URL_GIVEN = process.env.CULET_URL;
const host = URL_GIVEN ? new URL(URL_GIVEN).host : "";
const options = { skip: URL_GIVEN ? false : "CULET_URL is not set", timeout: 30_000 };
const fresh = (name) => `${name}-${crypto.randomUUID().slice(0, 8)}`;
const QUICK = { minReconnectionDelay: 20, maxReconnectionDelay: 40 };
const OLDER = process.env.CULET_PACKAGES === "older";

function openClient(t, name, more = {}) {
  const client = new AgentClient({ agent: "Supervisor", name, host, WebSocket, ...QUICK, ...more });
  t.after(() => client.close());
  return client;
}
const next = (client, kind) => new Promise((resolve) => client.addEventListener(kind, resolve, { once: true }));
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const rejection = (promise) => promise.then(() => assert.fail("it was answered"), (error) => error.message);

/** The frames that a client gets, decoded, as they come. */
function framesOf(client) {
  const frames = [];
  client.addEventListener("message", ({ data }) => frames.push(JSON.parse(data)));
  return frames;
}

// -------------------------------------------------------------------------- on connect

test("W-004: a name is told decoded, however it was written in the address", options, async (t) => {
  const stem = fresh("na");
  for (const name of [`${stem} me`, `${stem}%20me`]) {
    const client = openClient(t, name);
    await client.ready;
    assert.equal(client.name, `${stem} me`);
  }
});

test("W-012: the label stays over lost sockets of one client", options, async (t) => {
  const client = openClient(t, fresh("label"));
  const label = await client.call("label", []);
  const closed = next(client, "close");
  await rejection(client.call("hang_up", [1012]));
  await closed;

  assert.equal(await client.call("label", []), label);
  assert.notEqual(await openClient(t, fresh("label")).call("label", []), label);
});

test("W-043 W-054: who has a state is ready when it is there, who has none at once", options, async (t) => {
  const states = [];
  const one = openClient(t, fresh("ready"), { onStateUpdate: (state) => states.push(state) });
  const frames = framesOf(one);
  await one.ready;
  if (!OLDER) assert.deepEqual(states, [{ n: 0 }]);
  assert.equal(frames[0].stateFollows, true);

  const other = openClient(t, fresh("ready"), { agent: "Plain" });
  const said = framesOf(other);
  await other.ready;
  assert.equal(other.agent, "plain");
  assert.equal(await other.call("ping", ["x"]), "x");
  assert.deepEqual(said.map(({ type }) => type), ["cf_agent_identity", "cf_agent_mcp_servers", "rpc"]);
});

test("W-046 W-054: a client that is not told whom it talks to is never ready, and works", options, async (t) => {
  const client = openClient(t, fresh("hush"), { agent: "Hush" });
  let ready = false;
  client.ready.then(() => (ready = true));

  assert.equal(await client.call("ping", ["x"]), "x");
  assert.deepEqual(client.state, { n: 0 });
  await pause(50);
  assert.equal(ready, false);
  assert.equal(client.identified, false);
});

// -------------------------------------------------------------------------- ends

test("W-065: 1008 and 4000 to 4999 are the end, and everything that waits hears so", options, async (t) => {
  for (const code of [1008, 4000, 4401, 4410, 4999]) {
    let opened = 0;
    const told = [];
    const client = openClient(t, fresh("end"), { onConnectionError: (error) => told.push(error) });
    client.addEventListener("open", () => (opened += 1));
    await client.ready;
    const waits = rejection(client.call("wait", []));
    await rejection(client.call("hang_up", [code]));

    assert.equal(await waits, "Connection closed");
    const { code: given, reason, wasClean } = client.connectionError;
    assert.deepEqual([given, reason, wasClean], [code, "as asked", true]);
    assert.equal(told.length, 1);
    await pause(100); // five times the pause before another try
    assert.equal(opened, 1);
    assert.equal(await rejection(client.call("ping", ["x"])), "Connection closed");
  }
});

test("W-066: after any other code the client comes back by itself, also after 1000", options, async (t) => {
  for (const code of [1000, 1001, 1011, 1012, 3000, 3999]) {
    const client = openClient(t, fresh("back"));
    await client.ready;
    const closed = next(client, "close");
    await rejection(client.call("hang_up", [code]));

    assert.equal((await closed).code, code);
    await client.ready;
    assert.equal(client.connectionError, null);
    assert.equal(await client.call("ping", [`${code}`]), `${code}`);
  }
});

test("W-066 W-069: after a line that broke the client comes back by itself", options, async (t) => {
  const sockets = [];
  class Kept extends WebSocket {
    constructor(...args) {
      super(...args);
      sockets.push(this);
    }
  }
  const client = openClient(t, fresh("broken"), { WebSocket: Kept });
  await client.ready;
  const closed = next(client, "close");
  sockets[0].terminate(); // what the client sees of being cut: no close frame

  assert.equal((await closed).code, 1006);
  assert.equal(await client.call("ping", ["back"]), "back");
  assert.equal(sockets.length, 2);
});

test("W-067: a call that was sent is lost with its socket, one that was not goes over the next", options, async (t) => {
  const client = openClient(t, fresh("queue"), { minReconnectionDelay: 200, maxReconnectionDelay: 200 });
  await client.ready;
  const [closed, sent] = [next(client, "close"), rejection(client.call("wait", []))];
  await rejection(client.call("hang_up", [1012]));
  await closed;
  assert.equal(await sent, "Connection closed");
  const frames = framesOf(client);

  assert.equal(await client.call("ping", ["queued"]), "queued");

  assert.ok(frames.findIndex(({ type }) => type === "rpc") > 0, "the server introduced itself first");
});

test("W-032: a handshake that is answered in HTTP is tried again for ever", options, async (t) => {
  for (const refused of [
    { basePath: "nowhere/x" }, // the app's 404
    { query: { __agents_transport: "other" } }, // ours: 400
  ]) {
    let tries = 0;
    class Counted extends WebSocket {
      constructor(...args) {
        super(...args);
        tries += 1;
      }
    }
    const client = openClient(t, fresh("http"), { ...refused, WebSocket: Counted });
    client.addEventListener("error", () => {});
    const codes = [];
    client.addEventListener("close", ({ code }) => codes.push(code));
    while (codes.length < 4) await next(client, "close");
    client.close();

    assert.ok(tries >= 4, `${tries} tries`);
    assert.equal(client.connectionError, null, "and nobody is told");
  }
});

// -------------------------------------------------------------------------- state and calls

test("W-072: a state that is refused is told, and the client has the true one again", options, async (t) => {
  const told = [];
  const client = openClient(t, fresh("state"), {
    query: { readonly: 1 },
    onStateUpdateError: (error) => told.push(error),
  });
  await client.ready;
  client.setState({ n: 99 });
  assert.deepEqual(client.state, { n: 99 }, "it shows its own at once");
  await client.call("ping", ["x"]);

  assert.deepEqual(told, ["Connection is readonly"]);
  assert.deepEqual(client.state, { n: 0 });
});

test("W-082: a method that returns nothing gives undefined", options, async (t) => {
  assert.equal(await openClient(t, fresh("void")).call("nothing", []), undefined);
});
