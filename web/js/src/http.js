// A question to a chat agent over plain HTTP, and its answer as server-sent events: for code
// that asks once and goes. No socket stays open, no state is kept. When the line is cut, the
// same turn is read again, behind what is here, until the server says its end.

import { addressOf, placeText } from "./address.js";
import { CallFailed, ConnectionEnded, ConnectionLost } from "./errors.js";
import { pauseBefore } from "./line.js";
import { applyChunkToParts } from "./parts.js";

const SILENCE_MS = 45_000; // three of the server's signs of life
const RESUME_MS = 15_000; // a network that has gone answers no attempt, and refuses none
const ERROR_CHARS = 2_000; // of what a refusal says

const given = async (fields) => (typeof fields === "function" ? fields() : fields);

/**
 * Asks the chat agent at `place` (as of `AgentClient`); `question` is a text or a UIMessage,
 * `body` are custom keys for the agent. `query` and `headers` are objects, or functions that
 * give or promise them, asked anew for each request. Resolves with an `HttpAnswer` when the
 * server has the question on disk: who leaves then stops nothing. Rejects with
 * `ConnectionEnded` when the server refuses, with `ConnectionLost` when nobody knows whether
 * it arrived. `signal` ends the reading. `resumeMs`: the most that one attempt to read on may
 * wait for its answer, before the next.
 */
export async function askOverHttp(place, question, { body = {}, ...options } = {}) {
  const parts = [{ type: "text", text: String(question) }];
  const message =
    typeof question === "object" ? question : { id: crypto.randomUUID(), role: "user", parts };
  const told = JSON.stringify({ ...body, messages: [message], trigger: "submit-message" });
  const answer = new HttpAnswer(placeText(place), options);
  await answer.begin(told);
  return answer;
}

/** The answer to one question: a loop over it gets its chunks, `done()` its text. */
class HttpAnswer {
  /** `completed` or `aborted`; null while it goes on, or when it failed. */
  outcome = null;
  turn = "";
  /** The parts of the message so far. */
  parts = [];
  #place;
  #options;
  #reader = null;
  #decoder = null;
  #rest = "";
  #queue = [];
  #error = null;
  #next = 0; // the number of the first chunk that was not taken
  #at = 0; // the number of the next chunk of this line

  constructor(place, options) {
    [this.#place, this.#options] = [place, options];
  }

  get text() {
    return this.parts.map(({ type, text }) => (type === "text" ? text : "")).join("");
  }

  async *[Symbol.asyncIterator]() {
    try {
      for (;;) {
        while (this.#queue.length > 0) yield this.#queue.shift();
        if (this.#error) throw this.#error;
        if (this.outcome !== null) return;
        await this.#more();
      }
    } finally {
      this.#leave(); // another loop goes on where this one was left
    }
  }

  /** Reads to the end and resolves with the text; rejects with `CallFailed` if the turn failed. */
  async done() {
    for await (const _ of this);
    return this.text;
  }

  /** Asks, once: `askOverHttp` does it. */
  async begin(body) {
    let answer;
    try {
      answer = await this.#open("chat", { method: "POST", body }, { "content-type": "application/json" });
    } catch (error) {
      this.#options.signal?.throwIfAborted();
      throw new ConnectionLost(1006, String(error));
    }
    if (answer.status !== 200) throw await refusal(answer);
    this.turn = answer.headers.get("x-turn") ?? "";
    this.#listen(answer);
  }

  async #open(leaf, init, more = {}) {
    const { query, headers, fetch = globalThis.fetch } = this.#options;
    const signal = AbortSignal.any([this.#options.signal, init.signal].filter(Boolean));
    const url = addressOf(this.#place, "http", await given(query));
    url.pathname = `${url.pathname.replace(/\/$/, "")}/${leaf}`;
    if (init.turn) url.searchParams.set("turn", init.turn);
    const fields = { accept: "text/event-stream", ...(await given(headers)), ...more };
    return fetch(url, { ...init, headers: fields, signal, cache: "no-store" });
  }

  #listen(answer) {
    this.#reader = answer.body.getReader();
    this.#decoder = new TextDecoder();
    [this.#rest, this.#at] = ["", 0];
  }

  #leave() {
    this.#reader?.cancel().catch(() => undefined);
    this.#reader = null;
  }

  /** Takes what comes next; over another line if this one is cut. */
  async #more() {
    if (this.#reader === null) await this.#again();
    const reader = this.#reader;
    const silent = setTimeout(() => reader.cancel().catch(() => undefined), SILENCE_MS);
    try {
      const { done, value } = await reader.read();
      if (done) this.#reader = null; // it ended, and not by saying so
      else this.#feed(this.#decoder.decode(value, { stream: true }));
    } catch {
      this.#options.signal?.throwIfAborted();
      this.#reader = null;
    } finally {
      clearTimeout(silent);
    }
  }

  async #again() {
    const { signal, chance = Math.random, resumeMs = RESUME_MS } = this.#options;
    for (let tries = 0; ; tries += 1) {
      await new Promise((wake) => setTimeout(wake, pauseBefore(tries, chance())));
      signal?.throwIfAborted();
      const late = new AbortController();
      const bell = setTimeout(() => late.abort(), resumeMs);
      try {
        const answer = await this.#open("chat/x/stream", { turn: this.turn, signal: late.signal });
        if (answer.status === 200) return this.#listen(answer);
        if (answer.status === 204 || (answer.status >= 400 && answer.status < 500)) throw await refusal(answer);
        await answer.body?.cancel();
      } catch (error) {
        if (error instanceof ConnectionEnded) throw error;
      } finally {
        clearTimeout(bell);
      }
    }
  }

  #feed(text) {
    const events = (this.#rest + text).split(/\r?\n\r?\n/);
    this.#rest = events.pop();
    for (const event of events) {
      const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      if (lines.length > 0) this.#take(lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n"));
    }
  }

  #take(data) {
    if (this.outcome !== null || this.#error !== null) return;
    if (data === "[DONE]") {
      this.outcome = "completed";
      return;
    }
    const chunk = parsed(data);
    if (typeof chunk?.type !== "string") return; // none of the protocol's
    if (chunk.type === "error") this.#error = new CallFailed(String(chunk.errorText || "the turn failed"));
    else if (chunk.type === "abort") this.outcome = "aborted";
    else this.#chunk(chunk);
  }

  #chunk(chunk) {
    const number = this.#at;
    this.#at += 1;
    if (number < this.#next) return; // it was read over another line
    this.#next = this.#at;
    this.parts = applyChunkToParts(this.parts, chunk);
    this.#queue.push(chunk);
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

async function refusal(answer) {
  const text = await answer.text().catch(() => "");
  const why = text.slice(0, ERROR_CHARS).trim() || "the turn is not kept";
  return new ConnectionEnded(4000 + answer.status, why);
}
