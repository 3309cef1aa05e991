// One agent on a server, as an object that is kept up to date.
//
// Every frame goes through the pure folds (`chat.js`, `reducer.js`); `snapshot` is what they
// say, a new object when something changed. On every new connection of a chat three things
// are asked again, because nobody knows what was missed: is a turn running (resume), what is
// stored (history), and, when both are known, whether a question ever arrived.

import { addressOf, placeText } from "./address.js";
import { PARAMETER, knownText, noted } from "./attach.js";
import {
  activeTurn,
  applyChatFrame,
  ask,
  cleared,
  emptyChat,
  ended,
  messagesToSend,
  stopping,
  withTranscript,
} from "./chat.js";
import { CallFailed, ConnectionEnded, UsageError } from "./errors.js";
import { Line } from "./line.js";
import { applyAgentToolEvents, emptyState } from "./reducer.js";
import { Requests } from "./requests.js";
import { approvalFrame, resultFrame, waitingCalls } from "./waiting.js";

/** Of the gateway's 1 MiB a message: room for the envelope and for escapes. */
const BODY_LIMIT = 400_000;
const HISTORY_RETRY_MS = 1_000;
const REPLAY_MS = 5_000; // in which a replay has begun, where there is one
/** A call of no method: its answer says that all frames before it were taken. */
const FENCE = "cf_agent_state";

const uuid = () => crypto.randomUUID();
/** Under which an answer to a run waits for what became of it. */
const answerKey = (...ids) => JSON.stringify(ids);

export class AgentClient extends EventTarget {
  #options;
  #place;
  #id = uuid();
  #line;
  #requests = new Requests((text) => this.#line.send(text)); // calls, and answers to runs
  #turns = new Map(); // request id to {answer, resolve, reject}
  #listeners = new Set();
  #known = new Map(); // what a next connection says it has of runs
  #waiting = []; // frames of runs that are folded together
  #connection = 0; // counts them; what an earlier one asked for is void
  #probe = null; // what this connection has asked: which turn runs
  #runs = null; // and what it was told: a request id, or "none"
  #acked = new Set(); // request ids whose replay this connection has asked for
  #heardOf = new Set(); // request ids of which this connection has brought something
  #sentOn = new Map(); // request id to the connection that carried the question
  #stateFollows = false;
  #welcome = Promise.withResolvers?.() ?? withResolvers();

  /** What is known now; a new object when it changed, so a view can compare by identity. */
  snapshot = {
    link: { kind: "connecting", tries: 0 },
    identified: false,
    name: "",
    agent: "",
    state: undefined,
    runs: emptyState(),
    chat: emptyChat(),
    loaded: false,
    waitingCalls: [],
  };

  /**
   * `place`: the agent's URL or path, or `{host, agent, name, sub, prefix}`. Options: `chat`
   * (it is a chat agent: keep its messages), `query` (fields, or a function that gives or
   * promises them, asked anew for each attempt), `WebSocket`, `fetch`, `chance`. A connection
   * is made at once, and again until `close()` or until the server refuses for good. Throws
   * `UsageError` where there is no `WebSocket`, or where the place is no address.
   */
  constructor(place, options = {}) {
    super();
    this.#options = options;
    this.#place = placeText(place);
    this.#welcome.promise.catch(() => undefined);
    this.#line = new Line(
      () => this.#address("ws"),
      {
        open: () => this.#opened(),
        text: (text) => this.#heard(text),
        lost: (ending) => this.#requests.lost(ending),
        link: (link) => this.#linked(link),
      },
      options,
    );
    this.#line.connect();
  }

  async #address(scheme) {
    const { query } = this.#options;
    const fields = typeof query === "function" ? await query() : query;
    const own = { _pk: this.#id, [PARAMETER]: knownText(this.#known) };
    return addressOf(this.#place, scheme, scheme === "ws" ? { ...fields, ...own } : fields);
  }

  // ------------------------------------------------------------------------- to look at

  /** Resolves when the agent has said who it is; rejects when it never will. */
  get ready() {
    return this.#welcome.promise;
  }

  get state() {
    return this.snapshot.state;
  }

  get runs() {
    return this.snapshot.runs;
  }

  get messages() {
    return this.snapshot.chat.messages;
  }

  get waitingCalls() {
    return this.snapshot.waitingCalls;
  }

  /** Resolves with the snapshot when `holds(snapshot)`; it is asked after each change. */
  until(holds, { signal } = {}) {
    return new Promise((resolve, reject) => {
      const look = () => {
        try {
          signal?.throwIfAborted();
          if (holds(this.snapshot)) resolve(this.snapshot);
          else if (this.#over) throw this.#over;
          else return;
        } catch (error) {
          reject(error);
        }
        stop();
        signal?.removeEventListener("abort", look);
      };
      const stop = this.subscribe(look);
      signal?.addEventListener("abort", look);
      look();
    });
  }

  /** Calls `listener(snapshot)` after each change; gives the function that ends it. */
  subscribe(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  #change(members) {
    const before = this.snapshot;
    const next = { ...before, ...members };
    if (next.runs !== before.runs || next.chat.messages !== before.chat.messages) {
      const calls = waitingCalls(next);
      const same = calls.length === before.waitingCalls.length
        && calls.every((call, at) => call === before.waitingCalls[at]);
      if (!same) next.waitingCalls = calls;
    }
    this.snapshot = next;
    for (const listener of [...this.#listeners]) listener(this.snapshot);
  }

  // ------------------------------------------------------------------------------ calls

  /**
   * Calls a method. Rejects with `CallFailed` (the server's public text), or `ConnectionLost`
   * when the socket went before the answer: it may have run. One that was not sent yet goes
   * over the next socket. `signal` forgets the call; the server does not hear of it.
   */
  call(method, args = [], { signal } = {}) {
    return this.#request(method, args, { signal });
  }

  /** Calls a method that streams; a loop over it gets each item, and returns the result. */
  async *stream(method, args = [], { signal } = {}) {
    const items = [];
    let wake = withResolvers();
    const item = (value) => {
      items.push(value);
      wake.resolve();
    };
    let ended = false;
    const leave = new AbortController();
    const signals = AbortSignal.any(signal ? [signal, leave.signal] : [leave.signal]);
    const end = this.#request(method, args, { signal: signals, item }).finally(() => {
      ended = true;
      wake.resolve();
    });
    end.catch(() => undefined);
    try {
      for (;;) {
        while (items.length > 0) yield items.shift();
        if (ended) break;
        wake = withResolvers();
        await wake.promise;
      }
      return await end;
    } finally {
      leave.abort();
    }
  }

  /** Sets the agent's state; rejects with `CallFailed` when the server refuses it. */
  async setState(state) {
    // The echo comes in its place among the states of others: all end with the last one.
    const frame = { type: "cf_agent_state", state, echo: true };
    let refused = null;
    const listen = ({ detail }) => (refused = detail);
    this.addEventListener("state-error", listen);
    try {
      await this.#request(FENCE, [], { before: frame });
    } catch (error) {
      if (!(error instanceof CallFailed)) throw error; // as it must: there is no such method
    } finally {
      this.removeEventListener("state-error", listen);
    }
    if (refused !== null) throw new CallFailed(refused);
  }

  #request(method, args, { before, ...options }) {
    const id = uuid();
    const frame = { type: "rpc", id, method, args };
    const texts = (before ? [before, frame] : [frame]).map((one) => JSON.stringify(one));
    return this.#requests.add(id, texts, options);
  }

  #answered(frame) {
    const { id } = frame;
    if (frame.success !== true) {
      this.#requests.reject(id, new CallFailed(String(frame.error ?? "it failed")));
    } else if (frame.done === false) this.#requests.item(id, frame.result);
    else this.#requests.resolve(id, frame.result);
  }

  /** Sends a message of the app; false when there is no open socket to take it. */
  send(message) {
    return this.#line.send(typeof message === "string" ? message : JSON.stringify(message));
  }

  // ------------------------------------------------------------------------------- chat

  /**
   * Asks a question: a text, or a UIMessage with `id`, `role` and `parts`. Gives `{id, done}`;
   * `done` resolves to `{outcome, message}` or rejects with `CallFailed`. The outcome is
   * `completed`, `aborted`, `skipped`, or `ended`: it is over, and how is not kept any more. It goes
   * on over lost sockets: the same id is the same turn. `body` are custom keys for the agent.
   */
  ask(question, { id = uuid(), body = {} } = {}) {
    if (!this.#options.chat) throw new UsageError("give {chat: true} to talk to a chat agent");
    if (this.#over) throw this.#over;
    const parts = [{ type: "text", text: String(question) }];
    const message =
      typeof question === "object" ? question : { id: uuid(), role: "user", parts };
    const reply = (messages) => {
      const at = messages.findIndex((one) => one.id === message.id);
      const next = at < 0 ? undefined : messages[at + 1];
      return next?.role === "assistant" ? next : null;
    };
    const turn = { body, reply, ...withResolvers() };
    turn.promise.catch(() => undefined);
    this.#turns.set(id, turn);
    this.#change({ chat: ask(this.snapshot.chat, { id, message }) });
    this.#sendQuestion({ id, messageId: message.id });
    return { id, done: turn.promise };
  }

  /** Without an open socket this does nothing: the next connection asks for what is unsent. */
  #sendQuestion({ id, messageId }) {
    const messages = messagesToSend(this.snapshot.chat, messageId, BODY_LIMIT);
    const inner = { ...this.#turns.get(id)?.body, messages, trigger: "submit-message" };
    const init = { method: "POST", body: JSON.stringify(inner) };
    if (this.send({ type: "cf_agent_use_chat_request", id, init })) {
      this.#sentOn.set(id, this.#connection);
    }
  }

  /** Stops a turn; without an id the one that runs. False when it cannot be sent. */
  stop(id = activeTurn(this.snapshot.chat)?.id) {
    if (id === undefined || !this.send({ type: "cf_agent_chat_request_cancel", id })) return false;
    this.#change({ chat: stopping(this.snapshot.chat, id) });
    return true;
  }

  /** Clears the history, on the server as well. False when it cannot be sent. */
  clear() {
    if (!this.send({ type: "cf_agent_chat_clear" })) return false;
    this.#folded({ chat: cleared(this.snapshot.chat), runs: emptyState() });
    return true;
  }

  /**
   * Gives a tool call that waits its result, or the `error` that it ended in. With the `runId`
   * of the run that asks, however far below: resolves to whether this answer was the first,
   * and rejects with `CallFailed` when the server, or a gate, will not have it, or with
   * `ConnectionLost` when nobody knows. Without one it is a call of the chat's own message:
   * resolves when it is sent, as nobody says what became of it. `signal` forgets the answer.
   */
  answerCall(toolCallId, output, { signal, ...options } = {}) {
    return this.#answer(resultFrame(toolCallId, output, options), signal);
  }

  /** Says whether a tool call that waits for a person may run; else as `answerCall`. */
  approveCall(toolCallId, approved = true, { signal, ...options } = {}) {
    return this.#answer(approvalFrame(toolCallId, approved, options), signal);
  }

  #answer(frame, signal) {
    const { runId, toolCallId } = frame;
    const own = runId === undefined;
    const text = JSON.stringify(frame);
    const answer = this.#requests.add(own ? uuid() : answerKey(runId, toolCallId), [text], {
      signal,
      unanswered: own,
    });
    answer.catch(() => undefined); // who does not wait for it sees the call wait on
    return answer;
  }

  // --------------------------------------------------------------------- the connection

  /** Tries again now, if a pause between two attempts is running. */
  retry() {
    this.#line.retry();
  }

  /** Closes for good; what waits rejects with `ConnectionEnded`. */
  close(code, reason) {
    this.#line.close(code, reason);
  }

  #over = null;

  #linked(link) {
    if (link.kind === "refused" || link.kind === "closed") {
      this.#over = new ConnectionEnded(link.code, link.reason);
      this.#welcome.reject(this.#over);
      this.#requests.end(this.#over);
      for (const turn of this.#turns.values()) turn.reject(this.#over);
      this.#turns.clear();
    }
    this.#change({ link });
  }

  #opened() {
    this.#connection += 1;
    [this.#acked, this.#heardOf, this.#runs] = [new Set(), new Set(), null];
    this.#requests.opened();
    if (!this.#options.chat) return;
    this.#probe = uuid();
    this.send({ type: "cf_agent_stream_resume_request", probeId: this.#probe });
    this.#loadHistory(this.#connection);
  }

  #heard(text) {
    let frame = null;
    try {
      frame = JSON.parse(text);
    } catch {
      frame = null; // text that is not JSON belongs to the app
    }
    this.dispatchEvent(new MessageEvent("message", { data: text }));
    if (frame !== null && typeof frame === "object") this.#taken(frame);
  }

  #taken(frame) {
    switch (frame.type) {
      case "agent-tool-event":
        return this.#ofRuns(frame);
      case "rpc":
        return this.#answered(frame);
      case "cf_agent_run_answer":
        return this.#runAnswered(frame);
      case "cf_agent_identity":
        this.#stateFollows = frame.stateFollows === true;
        this.#change({ name: String(frame.name), agent: String(frame.agent), identified: true });
        return this.#stateFollows ? undefined : this.#welcome.resolve(this);
      case "cf_agent_state":
        this.#change({ state: frame.state });
        return this.#welcome.resolve(this);
      case "cf_agent_state_error":
        return this.dispatchEvent(new CustomEvent("state-error", { detail: String(frame.error) }));
      default:
        return this.#options.chat ? this.#ofChat(frame) : undefined;
    }
  }

  #runAnswered({ runId, toolCallId, accepted, error }) {
    const key = answerKey(runId, toolCallId);
    if (typeof error === "string") this.#requests.reject(key, new CallFailed(error));
    else this.#requests.resolve(key, accepted === true);
  }

  /** A replay of many runs is folded at once, at the end of this turn of the event loop. */
  #ofRuns(frame) {
    noted(this.#known, frame);
    this.#waiting.push(frame);
    if (this.#waiting.length === 1) queueMicrotask(() => this.#foldRuns());
    if (this.#waiting.length >= 1000) this.#foldRuns();
  }

  #foldRuns() {
    const frames = this.#waiting.splice(0);
    const runs = applyAgentToolEvents(this.snapshot.runs, frames);
    if (runs !== this.snapshot.runs) this.#change({ runs });
  }

  #ofChat(frame) {
    const isNone = frame.type === "cf_agent_stream_resume_none";
    if (isNone && frame.probeId !== undefined && frame.probeId !== this.#probe) return;
    if (frame.type === "cf_agent_use_chat_response") this.#heardOf.add(frame.id);
    if (frame.type === "cf_agent_stream_resuming") this.#acknowledge(frame.id);
    const before = this.snapshot.chat;
    if (isNone || frame.probeId === this.#probe) {
      this.#runs = isNone ? "none" : frame.id;
      this.#recall();
    }
    const chat = applyChatFrame(before, frame, { awaited: this.#awaited(before) });
    if (chat === before) return;
    const isIdle = activeTurn(before) && !activeTurn(chat);
    const isClear = frame.type === "cf_agent_chat_clear";
    this.#folded(isClear ? { chat, runs: emptyState() } : { chat });
    // It ended while nobody listened: what it left is in the history, maybe newer than ours.
    if (isIdle && isNone) this.#loadHistory(this.#connection);
  }

  /** The turns whose end somebody waits for here, and of which the server knows. */
  #awaited({ turns, unsent }) {
    const asked = new Set(unsent.map(({ id }) => id));
    const open = turns.filter(({ id, phase }) => phase !== "over" && this.#turns.has(id) && !asked.has(id));
    return open.map(({ id }) => id);
  }

  /**
   * Once it is known what runs: turns that do not may have ended while nobody listened, so their
   * replay is asked for, with its end. One that is not kept any more is only known to be over.
   */
  #recall() {
    if (this.#runs === null) return;
    const ids = this.#awaited(this.snapshot.chat).filter((id) => id !== this.#runs && !this.#acked.has(id));
    for (const id of ids) this.#acknowledge(id);
    if (this.#runs !== "none" || ids.length === 0) return;
    const [of, heard] = [this.#connection, this.#heardOf];
    setTimeout(() => {
      const silent = this.#awaited(this.snapshot.chat).filter((id) => ids.includes(id) && !heard.has(id));
      if (of !== this.#connection || silent.length === 0) return;
      this.#folded({ chat: silent.reduce(ended, this.snapshot.chat) }, { known: this.snapshot.loaded });
    }, REPLAY_MS);
  }

  /** `known`: what the server has stored is here, so a turn that is over has its message. */
  #folded(members, { known = false } = {}) {
    this.#change(members);
    const { turns, messages, notes } = members.chat;
    for (const { id, phase, outcome, messageId } of turns) {
      const turn = this.#turns.get(id);
      if (turn === undefined || phase !== "over" || (outcome === undefined && !known)) continue;
      this.#turns.delete(id);
      if (outcome === "error") {
        turn.reject(new CallFailed(notes.get(messageId)?.text ?? "the turn failed"));
      } else {
        const message = messages.find((one) => one.id === messageId) ?? turn.reply(messages);
        turn.resolve({ outcome: outcome ?? "ended", message });
      }
    }
  }

  /** A server may offer a turn twice, on connect and as an answer; its replay is wanted once. */
  #acknowledge(id) {
    if (this.#acked.has(id)) return;
    this.#acked.add(id);
    this.send({ type: "cf_agent_stream_resume_ack", id });
  }

  async #loadHistory(of) {
    const since = this.snapshot.chat.count;
    let messages;
    try {
      messages = await this.#history();
    } catch {
      const again = () => of === this.#connection && this.#line.isOpen && this.#loadHistory(of);
      setTimeout(again, HISTORY_RETRY_MS);
      return;
    }
    if (of !== this.#connection) return;
    const chat = withTranscript(this.snapshot.chat, messages, since);
    this.#folded({ chat, loaded: true }, { known: true });
    for (const question of this.snapshot.chat.unsent) {
      if (this.#sentOn.get(question.id) !== of) this.#sendQuestion(question); // it was lost
    }
    this.#recall(); // questions that did arrive are known now
  }

  /** The messages that the agent has stored; throws when it does not answer. */
  async #history() {
    const url = await this.#address("http");
    url.pathname += "/get-messages";
    const answer = await (this.#options.fetch ?? fetch)(url, { cache: "no-store" });
    if (!answer.ok) throw new Error(`history: HTTP ${answer.status}`);
    const messages = await answer.json();
    return Array.isArray(messages) ? messages : [];
  }
}

function withResolvers() {
  const made = {};
  made.promise = new Promise((resolve, reject) => Object.assign(made, { resolve, reject }));
  return made;
}
