// The package's own parts that need no server: how often a line is tried, what types promise.
import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import { test } from "node:test";

import { AgentClient, ConnectionEnded, UsageError } from "../../web/js/src/index.js";
import { agentPath } from "../../web/js/src/address.js";
import { askOverHttp } from "../../web/js/src/http.js";
import { knownText, noted } from "../../web/js/src/attach.js";
import { Line, isFinal, pauseBefore } from "../../web/js/src/line.js";

const SOURCES = new URL("../../web/js/src/", import.meta.url);

/** A network in the hands of the test: sockets open, speak and close when it says so. */
class Wire extends EventTarget {
  static made = [];
  readyState = 0;
  sent = [];

  constructor(url) {
    super();
    this.url = String(url);
    Wire.made.push(this);
  }

  open() {
    this.readyState = 1;
    this.dispatchEvent(new Event("open"));
  }

  say(frame) {
    const data = typeof frame === "string" ? frame : JSON.stringify(frame);
    this.dispatchEvent(new MessageEvent("message", { data }));
  }

  send(text) {
    this.sent.push(JSON.parse(text));
  }

  close(code = 1006, reason = "") {
    if (this.readyState === 3) return;
    this.readyState = 3;
    this.dispatchEvent(Object.assign(new Event("close"), { code, reason }));
  }
}
const settle = () => new Promise((resolve) => setImmediate(resolve));

function lineOf(t, address = async () => "ws://a/") {
  t.mock.timers.reset();
  t.mock.timers.enable({ apis: ["setTimeout"] });
  Wire.made = [];
  const told = [];
  const line = new Line(address, {
    open: () => told.push("open"),
    text: (text) => told.push(text),
    lost: ({ code }) => told.push(`lost ${code}`),
    probe: () => '"alive?"',
    link: (link) => told.push(link),
  }, { WebSocket: Wire, chance: () => 0.5 });
  const links = () => told.filter((one) => one.kind).map(({ kind }) => kind);
  return { line, told, links };
}

test("pauses grow to a limit, spread by chance, and only these codes are final", () => {
  const pauses = [0, 1, 2, 3, 4, 5, 50].map((tries) => pauseBefore(tries, 0.5));
  assert.deepEqual(pauses, [...pauses].sort((a, b) => a - b));
  assert.equal(pauses.at(-1), 5_000);
  assert.ok(pauseBefore(3, 0) < pauseBefore(3, 0.99));
  const codes = [1000, 1006, 1008, 1011, 1012, 3999, 4000, 4404, 4999, 5000];
  assert.deepEqual(codes.filter(isFinal), [1008, 4000, 4404, 4999]);
});

test("a line that drops comes back after its pause, later each time nothing was said", async (t) => {
  const { line, told, links } = lineOf(t);
  line.connect();
  for (const ms of [400, 640, 1024]) {
    await settle();
    Wire.made.at(-1).open();
    Wire.made.at(-1).close(1011);
    assert.equal(Math.round(told.at(-1).ms), ms);
    t.mock.timers.tick(ms + 1);
  }
  await settle();
  assert.equal(Wire.made.length, 4);
  Wire.made.at(-1).open();
  Wire.made.at(-1).say("hi");
  Wire.made.at(-1).close(1006);
  assert.equal(told.at(-1).ms, 400);
  assert.equal(links().filter((kind) => kind === "open").length, 4);
  line.close();
});

test("a handshake that hangs is given up and tried again", async (t) => {
  const { line, links } = lineOf(t);
  line.connect();
  await settle();

  t.mock.timers.tick(8_001);
  t.mock.timers.tick(401);
  await settle();

  assert.equal(Wire.made.length, 2);
  assert.deepEqual(links(), ["connecting", "waiting", "connecting"]);
  line.close();
});

test("an open line that is doubted shows that it lives, or is given up", async (t) => {
  const page = Object.assign(new EventTarget(), { visibilityState: "visible" });
  t.after(() => delete globalThis.document);
  globalThis.document = page;
  const { line, told } = lineOf(t);
  line.connect();
  await settle();
  const [wire] = Wire.made;
  wire.open();
  const look = (state) => {
    page.visibilityState = state;
    page.dispatchEvent(new Event("visibilitychange"));
  };
  look("hidden");
  assert.deepEqual(wire.sent, []);
  look("visible");
  look("visible");
  assert.deepEqual(wire.sent, ["alive?"]);
  wire.say("yes");
  t.mock.timers.tick(60_000);
  assert.equal(wire.readyState, 1);

  wire.close = () => undefined; // the network has gone: no goodbye arrives
  line.retry();
  t.mock.timers.tick(5_000);
  assert.deepEqual([told.at(-2), told.at(-1).kind], ["lost 1006", "waiting"]);
  t.mock.timers.tick(401);
  await settle();
  wire.say("late");
  assert.equal(Wire.made.length, 2);
  assert.equal(told.includes("late"), false);
  Wire.made[1].open();
  line.retry();
  line.close();
  look("visible");
  t.mock.timers.tick(60_000);
  assert.equal(Wire.made.length, 2);
});

test("an address that cannot be had is asked for again", async (t) => {
  let tries = 0;
  const { line, links } = lineOf(t, async () => {
    tries += 1;
    if (tries === 1) throw new Error("no token");
    return "ws://a/?token=2";
  });
  line.connect();
  await settle();
  t.mock.timers.tick(401);
  await settle();

  assert.deepEqual(Wire.made.map(({ url }) => url), ["ws://a/?token=2"]);
  assert.deepEqual(links(), ["connecting", "waiting", "connecting"]);
  line.close();
});

test("a line that was closed, or refused for good, is silent", async (t) => {
  const { line, told } = lineOf(t);
  line.connect();
  await settle();
  Wire.made[0].open();
  Wire.made[0].close(4410, "deleted");
  assert.deepEqual(told.at(-1), { kind: "refused", code: 4410, reason: "deleted" });
  line.retry();
  line.close();
  t.mock.timers.tick(60_000);
  await settle();
  assert.equal(Wire.made.length, 1);

  const other = lineOf(t);
  other.line.connect();
  other.line.close();
  await settle();
  t.mock.timers.tick(60_000);
  await settle();
  assert.deepEqual(other.links(), ["connecting", "closed"]);
  assert.ok(Wire.made.every(({ readyState }) => readyState === 3));
});

function clientOf(t, options = {}) {
  Wire.made = [];
  const client = new AgentClient("ws://a/agents/hub/x", { WebSocket: Wire, chance: () => 0, ...options });
  t.after(() => client.close());
  return client;
}

test("an answer of a socket that is gone changes nothing", async (t) => {
  const client = clientOf(t);
  await settle();
  const [wire] = Wire.made;
  wire.open();
  wire.say({ type: "cf_agent_identity", name: "x", agent: "hub" });
  await client.ready;
  const call = client.call("ping", [1]);
  const { id } = wire.sent.at(-1);
  wire.close(1006);
  await assert.rejects(call, { name: "ConnectionLost", code: 1006 });

  wire.say({ type: "rpc", id, success: true, result: 1, done: true });
  wire.say({ type: "cf_agent_state", state: 9 });

  assert.equal(client.state, undefined);
});

const answer = (runId, toolCallId, more) => ({ type: "cf_agent_run_answer", runId, toolCallId, accepted: true, ...more });

test("answers to runs are told apart by run and call, whatever these are called, and each in its order", async (t) => {
  const client = clientOf(t);
  await settle();
  const [wire] = Wire.made;
  wire.open();
  const ids = ["__proto__", "constructor", "toString"];
  const given = ids.map((id) => client.approveCall(id, true, { runId: id }));
  const again = client.answerCall("toString", 1, { runId: "toString", error: "no idea" });
  assert.deepEqual(wire.sent.map(({ toolCallId, runId }) => [toolCallId, runId]), [...ids, "toString"].map((id) => [id, id]));
  assert.deepEqual([wire.sent[0].approved, wire.sent[3].errorText, wire.sent[3].state], [true, "no idea", "output-error"]);

  wire.say(answer("of", "nobody"));
  for (const id of ids) wire.say(answer(id, id, { accepted: id !== "constructor" }));
  wire.say(answer("toString", "toString", { accepted: false, error: "not you" }));

  assert.deepEqual(await Promise.all(given), [true, false, true]);
  await assert.rejects(again, { name: "CallFailed", message: "not you" });
});

test("an answer that was sent is unknown when its socket goes, one that was not goes over the next", async (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const client = clientOf(t);
  await settle();
  Wire.made[0].open();
  const sent = client.approveCall("c", true, { runId: "r" });
  Wire.made[0].close(1006);
  const unsent = client.approveCall("c", false, { runId: "r" });
  const own = client.answerCall("mine", 7);
  await assert.rejects(sent, { name: "ConnectionLost" });

  t.mock.timers.tick(5_000);
  await settle();
  Wire.made[1].open();
  assert.deepEqual(Wire.made[1].sent.map(({ toolCallId, runId }) => [toolCallId, runId]), [["c", "r"], ["mine", undefined]]);
  Wire.made[1].say(answer("r", "c"));

  assert.deepEqual([await unsent, await own], [true, undefined]);
});

test("the answer of one that was forgotten is not the next one's", async (t) => {
  const client = clientOf(t);
  await settle();
  const [wire] = Wire.made;
  const early = new AbortController();
  const never = client.approveCall("c", true, { runId: "r", signal: early.signal });
  early.abort();
  await assert.rejects(never, { name: "AbortError" });
  wire.open();
  assert.deepEqual(wire.sent, []);
  const leave = new AbortController();
  const first = client.approveCall("c", true, { runId: "r", signal: leave.signal });
  const second = client.approveCall("c", false, { runId: "r" });
  leave.abort();
  await assert.rejects(first, { name: "AbortError" });

  wire.say(answer("r", "c", { accepted: true }));
  wire.say(answer("r", "c", { accepted: false }));

  assert.equal(await second, false);
});

test("until tells of what holds, of what will never, and can be forgotten", async (t) => {
  const client = clientOf(t);
  await settle();
  const [wire] = Wire.made;
  wire.open();
  wire.say({ type: "cf_agent_state", state: 1 });
  assert.equal((await client.until(({ state }) => state === 1)).state, 1);
  const leave = new AbortController();
  const waits = [client.until(({ state }) => state === 2), client.until(() => false), client.until(() => false, { signal: leave.signal })];
  const wrong = client.until(() => { throw new RangeError("mine"); });

  wire.say({ type: "cf_agent_state", state: 2 });
  leave.abort();
  client.close();

  assert.equal((await waits[0]).state, 2);
  await assert.rejects(waits[1], ConnectionEnded);
  await assert.rejects(waits[2], { name: "AbortError" });
  await assert.rejects(wrong, RangeError);
});

/** A client that has asked "hi" over a socket that is gone, its new socket, and the server's history. */
async function cutOff(t, { confirmed = true } = {}) {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const history = [];
  const fetch = async () => Response.json(history);
  const client = clientOf(t, { chat: true, fetch });
  await settle();
  Wire.made[0].open();
  await settle();
  const turn = client.ask("hi", { id: "t1" });
  history.push(client.messages[0]);
  if (confirmed) Wire.made[0].say({ type: "cf_agent_use_chat_response", id: "t1", seq: 0, body: '{"type":"start","messageId":"m"}' });
  Wire.made[0].close(1006);
  t.mock.timers.tick(5_000);
  await settle();
  const [, wire] = Wire.made;
  wire.open();
  const { probeId } = wire.sent.find(({ type }) => type === "cf_agent_stream_resume_request");
  const sent = (type) => wire.sent.filter((frame) => frame.type === `cf_agent_${type}`).map(({ id }) => id);
  const none = () => wire.say({ type: "cf_agent_stream_resume_none", probeId });
  return { client, turn, history, wire, probeId, sent, none };
}
const replayed = (seq, chunk, more) => ({ type: "cf_agent_use_chat_response", id: "t1", seq, body: JSON.stringify(chunk), replay: true, ...more });

test("a turn that has ended while nobody listened is asked for, and told as it ended", async (t) => {
  const { turn, wire, sent, none } = await cutOff(t);
  none();
  assert.deepEqual(sent("stream_resume_ack"), ["t1"]);
  wire.say(replayed(0, { type: "start", messageId: "m" }));
  wire.say(replayed(1, { type: "error", errorText: "out of words" }));
  wire.say({ type: "cf_agent_use_chat_response", id: "t1", body: "", done: true, outcome: "error" });

  await assert.rejects(turn.done, { name: "CallFailed", message: "out of words" });
});

test("so is one whose question was never confirmed, but is in the history", async (t) => {
  const one = await cutOff(t, { confirmed: false });
  one.none();
  assert.deepEqual(one.sent("stream_resume_ack"), [], "it may never have arrived");
  await settle();
  assert.deepEqual([one.sent("stream_resume_ack"), one.sent("use_chat_request")], [["t1"], []]);
  one.wire.say(replayed(0, { type: "start", messageId: "m" }));
  one.wire.say({ type: "cf_agent_use_chat_response", id: "t1", body: "", done: true, outcome: "aborted" });
  assert.equal((await one.turn.done).outcome, "aborted");
});

test("so is one where another's turn runs by now", async (t) => {
  const two = await cutOff(t);
  two.wire.say({ type: "cf_agent_stream_resuming", id: "theirs", probeId: two.probeId });
  assert.deepEqual(two.sent("stream_resume_ack"), ["theirs", "t1"]);
  two.client.close();
  await assert.rejects(two.turn.done, ConnectionEnded);
});

test("one that the server has forgotten is only known to be over, with what the history has of it", async (t) => {
  const { client, turn, history, none } = await cutOff(t);
  history.push({ id: "m", role: "assistant", parts: [{ type: "text", text: "kept" }] });
  await settle();
  none();
  t.mock.timers.tick(4_999);
  assert.equal(client.snapshot.chat.turns[0].phase, "streaming");
  t.mock.timers.tick(1);

  assert.equal((await turn.done).outcome, "ended");
});

test("who is told that a state follows is ready when it is there", async (t) => {
  const client = clientOf(t);
  await settle();
  const [wire] = Wire.made;
  let ready = false;
  client.ready.then(() => (ready = true));
  wire.open();
  wire.say({ type: "cf_agent_identity", name: "x", agent: "hub", stateFollows: true });
  await settle();
  assert.equal(ready, false);
  wire.say({ type: "cf_agent_state", state: { n: 1 } });
  await settle();
  assert.equal(ready, true);
});

test("a state that the server refuses is not ours", async (t) => {
  const client = clientOf(t);
  await settle();
  const [wire] = Wire.made;
  wire.open();
  wire.say({ type: "cf_agent_state", state: 1 });
  const setting = client.setState(2);
  await settle();
  const [state, fence] = wire.sent;
  assert.deepEqual(state, { type: "cf_agent_state", state: 2, echo: true });
  wire.say({ type: "cf_agent_state_error", error: "not that" });
  wire.say({ type: "rpc", id: fence.id, success: false, error: "no such method" });

  await assert.rejects(setting, { name: "CallFailed", message: "not that" });
  assert.equal(client.state, 1);
});

test("of states that are set at one time, only the one that is refused is", async (t) => {
  const client = clientOf(t);
  await settle();
  const [wire] = Wire.made;
  wire.open();
  const setting = [client.setState({ ["__proto__"]: 1 }), client.setState(2)];
  await settle();
  assert.equal(wire.sent.length, 2, "the second one waits");
  wire.say({ type: "cf_agent_state_error", error: "not that" });
  wire.say({ type: "rpc", id: wire.sent[1].id, success: false, error: "no such method" });
  await assert.rejects(setting[0], { name: "CallFailed", message: "not that" });
  await settle();
  wire.say({ type: "cf_agent_state", state: 2, echo: true });
  wire.say({ type: "rpc", id: wire.sent[3].id, success: false, error: "no such method" });
  await setting[1];

  assert.equal(client.state, 2);
  await assert.rejects(client.setState(undefined), UsageError);
});

test("everything that waits ends with the client", async (t) => {
  const client = clientOf(t, { chat: true, fetch: () => new Promise(() => undefined) });
  await settle();
  Wire.made[0].open();
  const waits = [client.ready, client.call("ping"), client.ask("hi").done];

  client.close();

  for (const wait of waits) await assert.rejects(wait, ConnectionEnded);
  assert.throws(() => client.ask("hi"), ConnectionEnded);
});

test("what is known of runs is told without gaps, the newest, in an address of bounded length", () => {
  const known = new Map();
  const frame = (runId, sequence, more = {}) =>
    noted(known, { sequence, event: { kind: sequence === 0 ? "started" : "chunk", runId }, ...more });
  frame("early", 1);
  frame("a", 0, { startedAt: 5 });
  for (const sequence of [1, 2, 4, 2, 0]) frame("a", sequence, { startedAt: 5 });
  frame("b", 0);
  assert.equal(knownText(known), '[["a",5,2]]');
  frame("a", 0, { startedAt: 6 });
  assert.equal(knownText(known), '[["a",6,0]]');
  noted(known, { sequence: 9, event: { kind: "cleared", runIds: ["a", 7] } });
  noted(known, { sequence: 9, event: null });
  assert.equal(knownText(known), null);
  for (let at = 0; at < 100; at += 1) frame(`${"r".repeat(100)}${at}`, 0, { startedAt: at });
  assert.equal(known.size, 64);
  const text = knownText(known);
  assert.ok(text.length <= 4_096 && text.length > 3_900 && JSON.parse(text)[0][1] === 99);
});

test("hostile frames change nothing and break nothing", async (t) => {
  const client = clientOf(t, { chat: true, fetch: () => new Promise(() => undefined) });
  await settle();
  const [wire] = Wire.made;
  wire.open();
  const before = client.snapshot;
  const odd = ["{", "null", "7", "[]", {}, { type: "rpc" }, { type: "rpc", id: "__proto__", success: true },
    { type: "agent-tool-event", event: { kind: "chunk", runId: "__proto__", body: "{}" } },
    { type: "cf_agent_use_chat_response", id: 5 }, { type: "cf_agent_chat_messages", messages: 7 },
    { type: "cf_agent_stream_resuming", id: {} }, { type: "constructor" }];
  for (const frame of odd) wire.say(frame);
  await settle();

  assert.deepEqual(client.snapshot.runs, before.runs);
  assert.deepEqual(client.messages, []);
  assert.equal({}.polluted, undefined);
});

test("each module's types name what it exports", async () => {
  const exported = /export (?:declare )?(?:async )?(?:function|class|const) (\w+)/g;
  const again = /export \{([^}]*)\}/g;
  const modules = readdirSync(SOURCES).filter((name) => name.endsWith(".d.ts"));
  assert.deepEqual(modules.sort(), ["chat.d.ts", "http.d.ts", "index.d.ts", "react.d.ts", "reducer.d.ts"]);
  for (const name of modules.filter((one) => one !== "react.d.ts")) {
    const text = readFileSync(new URL(name, SOURCES), "utf8");
    const typed = [...text.matchAll(exported)].map(([, word]) => word);
    for (const [, words] of text.matchAll(again)) typed.push(...words.split(",").map((word) => word.trim()));
    const real = Object.keys(await import(new URL(name.replace(".d.ts", ".js"), SOURCES)));
    assert.deepEqual(typed.sort(), real.sort(), name);
  }
});

test("who could never connect is told at once, not left waiting", () => {
  const whole = "http://a/agents/desk/x";
  assert.throws(() => new AgentClient(whole, { WebSocket: null }), UsageError);
  assert.throws(() => new AgentClient("/agents/desk/x", { WebSocket: Wire }), UsageError);
  assert.throws(() => new AgentClient({ agent: "Desk", name: "x" }, { WebSocket: Wire }), UsageError);
  for (const half of [{}, { host: "http://h.test" }, { host: "http://h.test", agent: "Desk" }, { name: "x" }]) {
    const needs = { name: "UsageError", message: "a place needs `agent` and `name`" };
    assert.throws(() => new AgentClient(half, { WebSocket: Wire }), needs);
  }
  assert.throws(() => new AgentClient(null, { WebSocket: Wire }), UsageError);
  for (const place of [whole, new URL(whole)]) new AgentClient(place, { WebSocket: Wire }).close();
});

test("a name that would be another address is refused, all others are what they are", () => {
  for (const name of [".", "..", ""]) assert.throws(() => agentPath({ agent: "Desk", name }), UsageError);
  for (const name of ["__proto__", "constructor", "a/../b", "%2e%2e", "...", "?#", "ü"]) {
    const path = agentPath({ agent: "Desk", name, sub: [{ agent: "Pad", name }] });
    const parts = new URL(path, "http://a").pathname.split("/");
    assert.deepEqual([parts.length, ...[3, 6].map((at) => decodeURIComponent(parts[at]))], [7, name, name]);
  }
});

/** A fetch that answers with these bytes, in these pieces, one list a request. */
function linesOf(...answers) {
  const asked = [];
  const fetch = async (url, init) => {
    asked.push([init.method ?? "GET", url.pathname + url.search]);
    const pieces = answers.shift();
    if (pieces === undefined || typeof pieces === "number") return new Response(pieces ? null : "no such turn", { status: pieces || 404 });
    const body = new ReadableStream({
      async pull(stream) {
        const piece = pieces.shift();
        if (piece) stream.enqueue(piece);
        else stream.close();
      },
    });
    return new Response(body, { headers: { "x-turn": "t/1" } });
  };
  return { asked, fetch };
}
const eventsOf = (chunks, eol = "\n") => new TextEncoder().encode(chunks.map((chunk) =>
  `: a sign${eol}${eol}data: {no${eol}${eol}data: null${eol}${eol}event: x${eol}data: ${chunk === null ? "[DONE]" : JSON.stringify(chunk)}${eol}${eol}`).join(""));

test("an answer over HTTP is read in any pieces, and from another line behind what is here", async () => {
  const say = (delta) => ({ type: "text-delta", id: "t", delta });
  const [first, whole] = [eventsOf([say("ä"), say("ö")]), eventsOf([say("ä"), say("ö"), say("ü"), null], "\r\n")];
  const bytes = (all) => [...all].map((byte) => Uint8Array.of(byte));
  const { asked, fetch } = linesOf(bytes(first).slice(0, -3), 503, bytes(whole));

  const answer = await askOverHttp("http://a/agents/bot/x/?k=1", "hi", { fetch, chance: () => -2 });

  const heard = [];
  for await (const { delta } of answer) heard.push(delta);
  assert.deepEqual([heard, answer.text, answer.outcome], [["ä", "ö", "ü"], "äöü", "completed"]);
  const again = ["GET", "/agents/bot/x/chat/x/stream?k=1&turn=t%2F1"];
  assert.deepEqual(asked, [["POST", "/agents/bot/x/chat?k=1"], again, again]);
});

/** A fetch that has no answer until it is given up. */
const unanswered = (_url, { signal }) =>
  new Promise((_, reject) => signal?.addEventListener("abort", () => reject(signal.reason)));

test("an attempt to read on that nobody answers is given up for the next", async () => {
  const events = eventsOf([{ type: "start" }, null]);
  const { asked, fetch } = linesOf([], [events]);
  let seen = 0;
  const answering = (url, init) => ((seen += 1) === 2 ? unanswered(url, init) : fetch(url, init));

  const answer = await askOverHttp("http://a/agents/bot/x", "hi", { fetch: answering, chance: () => -2, resumeMs: 20 });
  await answer.done();

  assert.deepEqual([answer.outcome, seen, asked.length], ["completed", 3, 2]);
});

test("who leaves while nobody answers does not wait for an answer", async () => {
  const { fetch } = linesOf([]);
  const leave = new AbortController();
  let seen = 0;
  const second = (url, init) => {
    seen += 1;
    if (seen === 1) return fetch(url, init);
    setImmediate(() => leave.abort(new Error("left")));
    return unanswered(url, init);
  };

  const answer = await askOverHttp("http://a/agents/bot/x", "hi", { fetch: second, chance: () => -2, signal: leave.signal });

  await assert.rejects(answer.done(), /left/);
  assert.equal(seen, 2);
});

test("a turn that is not kept any more is told, not read for ever", async () => {
  for (const [status, code] of [[204, 4204], [0, 4404]]) {
    const { fetch } = linesOf([eventsOf([{ type: "start" }])], status);
    const answer = await askOverHttp("http://a/agents/bot/x", "hi", { fetch, chance: () => -2 });
    await assert.rejects(answer.done(), { name: "ConnectionEnded", code });
    assert.equal(answer.outcome, null);
  }
});
