// What was asked of the server and waits for its answer, over sockets that may go.

import { ConnectionLost } from "./errors.js";

/**
 * Requests by key, those of one key in their order: the server answers them in it. One that
 * was on its way when a socket went is lost, nobody knows what became of it; one that was not
 * goes over the next.
 */
export class Requests {
  #send;
  #waiting = new Map(); // key to requests, oldest first; ids are any text, so no object
  #over = null;

  /** `send(text)`: whether an open socket took it. */
  constructor(send) {
    this.#send = send;
  }

  /**
   * Sends `texts`, now or over the next socket, and resolves with the answer, or, `unanswered`,
   * when they are sent. `item` is told each item of a stream. `signal` forgets it: an answer
   * that still comes is nobody's, and not the next one's.
   */
  add(key, texts, { signal, item, unanswered = false } = {}) {
    return new Promise((resolve, reject) => {
      signal?.throwIfAborted();
      if (this.#over) throw this.#over;
      const request = { key, texts, item, unanswered, sent: false, over: false };
      const forget = () => {
        if (!request.sent) this.#drop(request);
        request.reject(signal.reason);
      };
      const done = (settle) => (value) => {
        request.over = true;
        signal?.removeEventListener("abort", forget);
        settle(value);
      };
      Object.assign(request, { resolve: done(resolve), reject: done(reject) });
      signal?.addEventListener("abort", forget);
      this.#waiting.set(key, [...(this.#waiting.get(key) ?? []), request]);
      this.#try(request);
    });
  }

  #try(request) {
    if (request.sent) return;
    request.sent = request.texts.map((text) => this.#send(text)).includes(true);
    if (!request.sent || !request.unanswered) return;
    this.#drop(request);
    request.resolve();
  }

  #drop(request) {
    const { key } = request;
    const rest = (this.#waiting.get(key) ?? []).filter((one) => one !== request);
    if (rest.length > 0) this.#waiting.set(key, rest);
    else this.#waiting.delete(key);
  }

  /** One item of a stream has come. */
  item(key, value) {
    const request = this.#waiting.get(key)?.[0];
    if (request && !request.over) request.item?.(value);
  }

  /** The oldest request of this key has its answer. */
  resolve(key, value) {
    this.#end(key, (request) => request.resolve(value));
  }

  /** The oldest request of this key has failed. */
  reject(key, error) {
    this.#end(key, (request) => request.reject(error));
  }

  #end(key, settle) {
    const request = this.#waiting.get(key)?.[0];
    if (request === undefined) return;
    this.#drop(request);
    settle(request);
  }

  /** A socket is open: what was not sent goes over it. */
  opened() {
    for (const request of this.#all()) this.#try(request);
  }

  /** The socket has gone. */
  lost({ code, reason }) {
    for (const request of this.#all()) {
      if (!request.sent) continue;
      this.#drop(request);
      request.reject(new ConnectionLost(code, reason));
    }
  }

  /** There will be no other socket. */
  end(error) {
    this.#over = error;
    for (const request of this.#all()) {
      this.#drop(request);
      request.reject(error);
    }
  }

  #all() {
    return [...this.#waiting.values()].flat();
  }
}
