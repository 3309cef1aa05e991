// A scripted gateway, to LOOK at the page with: it plays one plausible session over the wire.
// A stand-in for eyes only; what is true about Culet is shown against the real server.
//
//   node fake-gateway.mjs [--port 8799] [--pace 40]

import { createServer } from "node:http";
import { readFile } from "node:fs/promises";
import { extname, join, normalize } from "node:path";
import { fileURLToPath } from "node:url";
import { WebSocketServer } from "ws";

const STATIC = fileURLToPath(new URL("../../web/culet/web/demo/static", import.meta.url));
const TYPES = {
  ".html": "text/html; charset=utf-8",
  ".js": "text/javascript; charset=utf-8",
  ".css": "text/css; charset=utf-8",
  ".svg": "image/svg+xml",
};

const FINDINGS = [
  {
    question: "How does asyncio.Queue behave?",
    passages: [
      {
        file: "stdlib/asyncio/queues.py",
        line: 34,
        quote:
          "class Queue(mixins._LoopBoundMixin):\n    \"\"\"A queue, useful for coordinating producer and consumer coroutines.\n\n    If maxsize is less than or equal to zero, the queue size is infinite. If it\n    is an integer greater than 0, then \"await put()\" will block when the\n    queue reaches maxsize, until an item is removed by get().",
      },
      {
        file: "stdlib/asyncio/queues.py",
        line: 41,
        quote:
          "    Unlike the standard library Queue, you can reliably know this Queue's size\n    with qsize(), since your single-threaded asyncio application won't be\n    interrupted between calling qsize() and doing an operation on the Queue.",
      },
    ],
    summary:
      "`asyncio.Queue` coordinates coroutines of one loop: `await put()` blocks when it is full, and `qsize()` is exact because nothing interrupts between two steps (stdlib/asyncio/queues.py:34).",
  },
  {
    question: "How does queue.Queue behave?",
    passages: [
      {
        file: "stdlib/queue.py",
        line: 28,
        quote:
          "class Queue:\n    '''Create a queue object with a given maximum size.\n\n    If maxsize is <= 0, the queue size is infinite.\n    '''",
      },
      {
        file: "stdlib/queue.py",
        line: 90,
        quote:
          "    def qsize(self):\n        '''Return the approximate size of the queue (not reliable!).'''\n        with self.mutex:\n            return self._qsize()",
      },
      {
        file: "stdlib/queue.py",
        line: 121,
        quote:
          "    def put(self, item, block=True, timeout=None):\n        '''Put an item into the queue.\n\n        If optional args 'block' is true and 'timeout' is None (the default),\n        block if necessary until a free slot is available.",
      },
    ],
    summary:
      "`queue.Queue` is for threads: a mutex and three conditions guard it, `put` may block with a timeout (stdlib/queue.py:121), and `qsize()` is only approximate (stdlib/queue.py:90).",
  },
  {
    question: "What does trio use instead of a queue?",
    passages: [
      {
        file: "trio/_channel.py",
        line: 43,
        quote:
          "def open_memory_channel(max_buffer_size):\n    \"\"\"Open a channel for passing objects between tasks within a process.\n\n    Memory channels are lightweight, cheap to allocate, and entirely\n    in-memory. They don't involve any operating-system resources, or any kind\n    of serialization.",
      },
    ],
    summary:
      "trio has no queue: `trio.open_memory_channel` gives a send end and a receive end that can be cloned and closed (trio/_channel.py:43).",
  },
];

const ANSWER = [
  "`asyncio.Queue` and `queue.Queue` look alike and serve different worlds.\n\n",
  "**Threads or tasks.** `queue.Queue` locks: any thread may call it, and `put` can block the thread, with a timeout [stdlib/queue.py:121]. ",
  "`asyncio.Queue` never locks; `await put()` suspends the coroutine until there is room [stdlib/asyncio/queues.py:34].\n\n",
  "**Size.** Among threads the size is a guess:\n\n",
  ">     def qsize(self):\n>         '''Return the approximate size of the queue (not reliable!).'''\n\n",
  "[stdlib/queue.py:90], while on one loop it is exact [stdlib/asyncio/queues.py:41].\n\n",
  "**trio** offers neither. It gives you two ends of a channel instead:\n\n",
  "- `open_memory_channel(max_buffer_size)` returns a send and a receive end [trio/_channel.py:43]\n",
  "- closing an end tells the other side, so consumers stop by themselves\n",
  "- a buffer of `0` makes every send wait for its receiver\n",
];

const words = (text) => text.match(/\S+\s*|\s+/g) ?? [];

/** The chunks of one run: a search with passages, then what was found, in words. */
function runScript({ question, passages, summary }, broken) {
  const progress = (fraction, phase, message) => ({
    type: "data-agent-progress",
    transient: true,
    data: { fraction, phase, message },
  });
  const chunks = [
    { type: "start", messageId: `child-${question.length}` },
    { type: "start-step" },
    progress(0.05, "searching", question.toLowerCase().replace("?", "")),
  ];
  passages.forEach((passage, at) => {
    const toolCallId = `search-${at}`;
    chunks.push(
      { type: "tool-input-available", toolCallId, toolName: "search", input: { terms: question } },
      { type: "tool-output-available", toolCallId, output: { passages: [passage] } },
      progress(0.2 + (0.5 * (at + 1)) / passages.length, "reading", passage.file),
    );
  });
  if (broken) return chunks;
  chunks.push(progress(0.8, "summing up", `${passages.length} passages`), { type: "text-start", id: "t" });
  for (const delta of words(summary)) chunks.push({ type: "text-delta", id: "t", delta });
  return [...chunks, { type: "text-end", id: "t" }, { type: "finish-step" }, { type: "finish" }];
}

/** A chat that plays its part; `pace` ms between two chunks. */
class Chat {
  messages = [];
  sockets = new Set();
  turn = null;
  runs = new Map();
  library = { phase: "indexing", done: 0, total: 1480, passages: 0 };
  asked = 0;

  constructor(name, pace) {
    this.name = name;
    this.pace = pace;
    this.indexing = setInterval(() => this.index(), 30);
  }

  index() {
    const done = Math.min(this.library.total, this.library.done + 21);
    const phase = done === this.library.total ? "ready" : "indexing";
    this.library = { ...this.library, done, phase, passages: Math.floor(done * 16.9) };
    if (phase === "ready") clearInterval(this.indexing);
    this.say({ type: "cf_agent_state", state: { library: this.library } });
  }

  say(frame, but = null) {
    for (const socket of this.sockets) if (socket !== but) socket.send(JSON.stringify(frame));
  }

  join(socket) {
    this.sockets.add(socket);
    socket.on("close", () => this.sockets.delete(socket));
    const send = (frame) => socket.send(JSON.stringify(frame));
    send({ type: "cf_agent_identity", name: this.name, agent: "assistant", stateFollows: true });
    send({ type: "cf_agent_state", state: { library: this.library } });
    for (const run of this.runs.values()) {
      for (const frame of run.frames) send({ ...frame, replay: true });
    }
    socket.on("message", (text) => this.hear(JSON.parse(text), socket, send));
  }

  hear(frame, socket, send) {
    if (frame.type === "cf_agent_stream_resume_request") {
      const { probeId } = frame;
      if (!this.turn) send({ type: "cf_agent_stream_resume_none", reason: "idle", probeId });
      else if (this.turn.frames.length === 0) send({ type: "cf_agent_stream_pending", id: this.turn.id, probeId });
      else {
        this.sockets.delete(socket);
        send({ type: "cf_agent_stream_resuming", id: this.turn.id, probeId });
      }
    } else if (frame.type === "cf_agent_stream_resume_ack") {
      this.sockets.add(socket);
      for (const old of this.turn?.frames ?? []) send({ ...old, replay: true });
      send({ type: "cf_agent_use_chat_response", id: frame.id, body: "", done: !this.turn, replay: true, replayComplete: true });
    } else if (frame.type === "cf_agent_use_chat_request") {
      const messages = JSON.parse(frame.init.body).messages;
      for (const message of messages) {
        if (!this.messages.some(({ id }) => id === message.id)) this.messages.push(message);
      }
      this.say({ type: "cf_agent_chat_messages", messages: this.messages }, socket);
      this.queue = (this.queue ?? Promise.resolve()).then(() => this.play(frame.id));
    } else if (frame.type === "cf_agent_chat_request_cancel") {
      if (this.turn?.id === frame.id) this.turn.stopped = true;
    } else if (frame.type === "cf_agent_chat_clear") {
      [this.messages, this.runs] = [[], new Map()];
      if (this.turn) this.turn.stopped = true;
      this.say({ type: "cf_agent_chat_clear" }, socket);
    }
  }

  async tick(turn) {
    await new Promise((done) => setTimeout(done, this.pace));
    return !turn.stopped;
  }

  async play(id) {
    const turn = { id, frames: [], stopped: false, message: { id: `m-${id}`, role: "assistant", parts: [] } };
    this.turn = turn;
    this.asked += 1;
    while (this.library.phase === "indexing") await this.tick(turn);
    const speak = (chunk) => {
      const seq = turn.frames.length;
      const frame = { type: "cf_agent_use_chat_response", id, body: JSON.stringify(chunk), done: false, seq };
      turn.frames.push(frame);
      this.say(frame);
    };
    speak({ type: "start", messageId: turn.message.id });
    speak({ type: "start-step" });
    const calls = FINDINGS.map((finding, at) => ({ finding, toolCallId: `${id}-call-${at}` }));
    for (const { finding, toolCallId } of calls) {
      const part = { type: "tool-research", toolName: "research", toolCallId, state: "input-available", input: { question: finding.question } };
      speak({ type: "tool-input-available", toolCallId, toolName: "research", input: part.input });
      turn.message.parts.push(part);
      await this.tick(turn);
    }
    const ends = await Promise.all(calls.map((call, at) => this.run(turn, call, at)));
    calls.forEach(({ toolCallId }, at) => {
      const output = ends[at];
      if (turn.stopped) return;
      speak({ type: "tool-output-available", toolCallId, output });
      Object.assign(turn.message.parts[at], { state: "output-available", output });
    });
    const text = { type: "text", text: "", state: "done" };
    turn.message.parts.push(text);
    if (!turn.stopped) speak({ type: "text-start", id: "a" });
    for (const delta of ANSWER.flatMap(words)) {
      if (!(await this.tick(turn))) break;
      speak({ type: "text-delta", id: "a", delta });
      text.text += delta;
    }
    this.messages.push(turn.message);
    this.turn = null;
    this.say({ type: "cf_agent_chat_messages", messages: this.messages });
    const outcome = turn.stopped ? "aborted" : "completed";
    this.say({ type: "cf_agent_use_chat_response", id, body: "", done: true, outcome });
  }

  async run(turn, { finding, toolCallId }, order) {
    const runId = `r-${order}-${toolCallId.slice(0, 8)}`;
    const run = { frames: [], finding };
    this.runs.set(runId, run);
    const speak = (event) => {
      const frame = { type: "agent-tool-event", parentToolCallId: toolCallId, sequence: run.frames.length, event: { runId, ...event } };
      run.frames.push(frame);
      this.say(frame);
    };
    speak({ kind: "started", agentType: "Researcher", order: 0, inputPreview: { question: "text" } });
    const broken = this.asked > 1 && order === 1;
    for (const chunk of runScript(finding, broken)) {
      for (let slow = 0; slow <= order; slow += 1) if (!(await this.tick(turn))) break;
      if (turn.stopped) {
        speak({ kind: "aborted", reason: "asker-ended" });
        return { ok: false, status: "aborted" };
      }
      speak({ kind: "chunk", body: JSON.stringify(chunk) });
    }
    if (broken) {
      speak({ kind: "error", error: "the model stopped answering in mid-stream" });
      return { ok: false, status: "error" };
    }
    speak({ kind: "finished", summary: finding.summary });
    return { ok: true, status: "completed", summary: finding.summary };
  }
}

/** The child's own chat, as it stands. */
function childMessages(run) {
  const parts = [];
  for (const { event } of run.frames.filter(({ event }) => event.kind === "chunk")) {
    const chunk = JSON.parse(event.body);
    if (chunk.type === "tool-output-available") {
      parts.push({ type: "tool-search", toolName: "search", toolCallId: chunk.toolCallId, state: "output-available", input: { terms: run.finding.question }, output: chunk.output });
    }
    if (chunk.type === "text-start") parts.push({ type: "text", text: "", state: "done" });
    if (chunk.type === "text-delta") parts.at(-1).text += chunk.delta;
  }
  const question = { id: "q", role: "user", parts: [{ type: "text", text: run.finding.question }] };
  return [question, { id: "a", role: "assistant", parts }];
}

/** Starts it; gives `{url, drop, close}`: `drop` cuts all sockets, as a crash would. */
export async function startFake({ port = 0, pace = 40 } = {}) {
  const chats = new Map();
  const chatOf = (name) => {
    if (!chats.has(name)) chats.set(name, new Chat(name, pace));
    return chats.get(name);
  };
  const server = createServer(async (request, response) => {
    const { pathname } = new URL(request.url, "http://fake");
    const [, , , name, , , runId] = pathname.split("/").map(decodeURIComponent);
    if (pathname.startsWith("/agents/") && pathname.endsWith("/get-messages")) {
      const chat = chatOf(name);
      const run = chat.runs.get(runId);
      const found = pathname.includes("/sub/") ? (run ? childMessages(run) : []) : chat.messages;
      response.setHeader("content-type", "application/json");
      return response.end(JSON.stringify(found));
    }
    const file = pathname === "/" ? "index.html" : normalize(pathname.replace(/^\/static\//, ""));
    try {
      response.setHeader("content-type", TYPES[extname(file)] ?? "application/octet-stream");
      return response.end(await readFile(join(STATIC, file)));
    } catch {
      response.statusCode = 404;
      return response.end("Not Found");
    }
  });
  const sockets = new WebSocketServer({ server });
  sockets.on("connection", (socket, request) => {
    const { pathname } = new URL(request.url, "http://fake");
    const name = decodeURIComponent(pathname.split("/")[3]);
    if (!pathname.includes("/sub/")) return chatOf(name).join(socket);
    socket.send(JSON.stringify({ type: "cf_agent_identity", name: "child", agent: "researcher" }));
    socket.on("message", (text) => {
      const { type, probeId } = JSON.parse(text);
      if (type !== "cf_agent_stream_resume_request") return;
      socket.send(JSON.stringify({ type: "cf_agent_stream_resume_none", reason: "idle", probeId }));
    });
    return undefined;
  });
  await new Promise((ready) => server.listen(port, "127.0.0.1", ready));
  const drop = () => sockets.clients.forEach((socket) => socket.terminate());
  const close = () => {
    chats.forEach((chat) => clearInterval(chat.indexing));
    drop();
    server.closeAllConnections();
    return new Promise((done) => server.close(done));
  };
  return { url: `http://127.0.0.1:${server.address().port}`, drop, close };
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const option = (name, otherwise) => {
    const at = process.argv.indexOf(name);
    return at < 0 ? otherwise : Number(process.argv[at + 1]);
  };
  const fake = await startFake({ port: option("--port", 8799), pace: option("--pace", 40) });
  console.log(`${fake.url}/`);
}
