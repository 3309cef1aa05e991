// One agent on a server, as an object that is kept up to date.
//
// Every frame goes through the pure folds (`chat.js`, `reducer.js`); `snapshot` is what they
// say, a new object when something changed.

import { addressOf, placeText } from "./address.js";
import { PARAMETER, knownText, noted } from "./attach.js";
import { emptyChat } from "./chat.js";
import { CallFailed, ConnectionEnded, UsageError } from "./errors.js";
import { Line } from "./line.js";
import { applyAgentToolEvents, emptyState } from "./reducer.js";
import { Requests } from "./requests.js";
import { uuid, withResolvers } from "./small.js";
import { Talk } from "./talk.js";
import { approvalFrame, resultFrame, waitingCalls } from "./waiting.js";

/** A call of no method: its answer says that all frames before it were taken. */
const FENCE = "cf_agent_state";

/** What is known before a word was heard. */
export const NOTHING = {
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

/** Under which an answer to a run waits for what became of it. */
const answerKey = (...ids) => JSON.stringify(ids);

export class AgentClient extends EventTarget {
  #options;
  #place;
  #id = uuid();
  #line;
  #requests = new Requests((text) => this.#line.send(text)); // calls, and answers to runs
  #talk = null; // the chat half, of a chat agent
  #listeners = new Set();
  #known = new Map(); // what a next connection says it has of runs
  #waiting = []; // frames of runs that are folded together
  #stateFollows = false;
  #setting = Promise.resolve(); // the last state that was set, taken or refused
  #refused = null;
  #welcome = withResolvers();

  /** What is known now; a new object when it changed, so a view can compare by identity. */
  snapshot = NOTHING;

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
        lost: (ending) => this.#lost(ending),
        link: (link) => this.#linked(link),
        probe: () => JSON.stringify({ type: "rpc", id: uuid(), method: FENCE, args: [] }),
      },
      options,
    );
    if (options.chat) {
      this.#talk = new Talk({
        send: (frame) => this.send(frame),
        isOpen: () => this.#line.isOpen,
        history: () => this.#history(),
        known: () => this.snapshot,
        change: (members) => this.#change(members),
      });
    }
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
  setState(state) {
    if (state === undefined) return Promise.reject(new UsageError("a state is JSON"));
    // The echo comes in its place among the states of others: all end with the last one.
    const frame = JSON.stringify({ type: "cf_agent_state", state, echo: true });
    // One after the other: a refusal names none.
    const setting = this.#setting.then(() => this.#set(frame));
    this.#setting = setting.catch(() => undefined);
    return setting;
  }

  async #set(frame) {
    this.#refused = null;
    try {
      await this.#request(FENCE, [], { before: frame });
    } catch (error) {
      if (!(error instanceof CallFailed)) throw error; // as it must: there is no such method
    }
    if (this.#refused !== null) throw new CallFailed(this.#refused);
  }

  #request(method, args, { before, ...options }) {
    const id = uuid();
    const frame = { type: "rpc", id, method, args };
    const text = JSON.stringify(frame);
    return this.#requests.add(id, before ? [before, text] : [text], options);
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
   * `completed`, `aborted`, `skipped`, or `ended`: it is over, and how is not kept any more.
   * It goes on over lost sockets: the same id is the same turn. `body` are custom keys for
   * the agent.
   */
  ask(question, options) {
    if (!this.#talk) throw new UsageError("give {chat: true} to talk to a chat agent");
    if (this.#over) throw this.#over;
    return this.#talk.ask(question, options);
  }

  /** Stops a turn; without an id the one that runs. False when it cannot be sent. */
  stop(id) {
    return this.#talk?.stop(id) ?? false;
  }

  /** Clears the history, on the server as well. False when it cannot be sent. */
  clear() {
    return this.#talk?.clear() ?? false;
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

  /**
   * Tries again now, if a pause between two attempts is running; an open connection has to show
   * that it lives. Done by itself when the network is back and when the page is looked at again.
   */
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
      this.#talk?.end(this.#over);
    }
    this.#change({ link });
  }

  #lost(ending) {
    this.#requests.lost(ending);
    this.#talk?.lost(ending);
  }

  #opened() {
    this.#requests.opened();
    this.#talk?.opened();
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
        this.#refused = String(frame.error);
        return undefined;
      default:
        return this.#talk?.taken(frame);
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
