// One socket to one agent, kept up by itself.
//
// It carries text frames both ways. When it drops, the next attempt comes after a pause that
// grows; a close code that says "do not come back" ends it. What was sent while no socket was
// open is not queued here: whoever asks again on `open` knows best what is still true.

import { UsageError } from "./errors.js";

const FIRST_PAUSE_MS = 400;
const LONGEST_PAUSE_MS = 5_000;
const GROWTH = 1.6;
const JITTER = 0.2;
const HANDSHAKE_MS = 8_000;
const ANSWER_MS = 5_000; // in which an open line that is doubted is heard

/** 1008 and 4000-4999: the server will not have this client back. */
export function isFinal(code) {
  return code === 1008 || (code >= 4000 && code <= 4999);
}

/** The pause before attempt `tries` (from 0), in ms; `chance` is in [0, 1). */
export function pauseBefore(tries, chance) {
  const pause = Math.min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS * GROWTH ** tries);
  return pause * (1 + JITTER * (2 * chance - 1));
}

/** How many bytes a text has on the wire. */
export const sizeOf = (text) => new TextEncoder().encode(text).length;

export class Line {
  #address;
  #on;
  #Socket;
  #chance;
  #socket = null;
  #tries = 0;
  #timer = null;
  #ended = false;
  #doubt = null;
  #largest = 0; // bytes of a text that this socket has carried
  #look = () => globalThis.document?.visibilityState !== "hidden" && this.retry();

  /**
   * `address()` gives, or promises, the URL of the next attempt. `on`: `open()`,
   * `text(string)`, `lost({code, reason, largest})` when an open socket has gone by itself (`largest`:
   * bytes of the largest text that it has carried), `probe()`,
   * a text that the server answers, and `link({kind, …})`, where kind is `connecting`, `open`, `waiting` (with `ms`), `refused`
   * (with `code` and `reason`: there is no other attempt) or `closed`. Throws `UsageError`
   * where there is no `WebSocket`.
   */
  constructor(address, on, { WebSocket = globalThis.WebSocket, chance = Math.random } = {}) {
    if (typeof WebSocket !== "function") {
      // tried again and again it would only be a silence: Node has none before 22
      throw new UsageError("there is no WebSocket here: give one, `{ WebSocket }` of the package ws");
    }
    [this.#address, this.#on, this.#Socket, this.#chance] = [address, on, WebSocket, chance];
    globalThis.addEventListener?.("online", this.#look);
    globalThis.document?.addEventListener("visibilitychange", this.#look);
  }

  async connect() {
    clearTimeout(this.#timer);
    this.#on.link({ kind: "connecting", tries: this.#tries });
    const attempt = {}; // until its socket is there
    this.#socket = attempt;
    let socket;
    try {
      socket = new this.#Socket(await this.#address());
    } catch (error) {
      if (this.#socket === attempt) this.#wait({ code: 1006, reason: String(error) });
      return;
    }
    if (this.#socket !== attempt) return void socket.close();
    let open = false;
    this.#socket = socket;
    this.#timer = setTimeout(() => socket.close(), HANDSHAKE_MS);
    socket.addEventListener("open", () => {
      if (socket !== this.#socket) return;
      clearTimeout(this.#timer);
      open = true;
      this.#largest = 0;
      this.#on.link({ kind: "open" });
      this.#on.open();
    });
    socket.addEventListener("message", ({ data }) => {
      if (socket !== this.#socket || typeof data !== "string") return;
      this.#trust();
      this.#tries = 0; // a server that only accepts and drops is not tried in a hurry
      this.#on.text(data);
    });
    socket.addEventListener("error", () => undefined); // its close tells
    socket.addEventListener("close", ({ code, reason }) => {
      if (socket !== this.#socket) return;
      if (open) this.#on.lost({ code, reason, largest: this.#largest });
      this.#wait({ code, reason });
    });
  }

  /**
   * Something may have changed (the network, the page is looked at again): a pause that is
   * running ends, and an open line has to show that it lives. A socket whose network has gone
   * without a word stays open for minutes; a browser cannot ping.
   */
  retry() {
    if (this.#ended) return;
    if (this.#socket === null) this.connect();
    else if (this.isOpen && this.#doubt === null) this.#check(this.#socket);
  }

  #check(socket) {
    this.send(this.#on.probe());
    this.#doubt = setTimeout(() => {
      const ending = { code: 1006, reason: "nothing is heard of the server" };
      socket.close(); // it may take its time: nobody waits for it
      this.#on.lost(ending);
      this.#wait(ending);
    }, ANSWER_MS);
  }

  #trust() {
    clearTimeout(this.#doubt);
    this.#doubt = null;
  }

  get isOpen() {
    return this.#socket?.readyState === 1;
  }

  /** Sends a text; false when there is no open socket to take it. */
  send(text) {
    if (!this.isOpen) return false;
    this.#largest = Math.max(this.#largest, sizeOf(text));
    this.#socket.send(text);
    return true;
  }

  /** Closes for good. */
  close(code = 1000, reason = "") {
    if (this.#ended) return;
    this.#end();
    const socket = this.#socket;
    this.#socket = null;
    socket?.close?.(code, reason);
    this.#on.link({ kind: "closed", code, reason });
  }

  #end() {
    this.#ended = true;
    this.#trust();
    clearTimeout(this.#timer);
    globalThis.removeEventListener?.("online", this.#look);
    globalThis.document?.removeEventListener("visibilitychange", this.#look);
  }

  #wait({ code, reason }) {
    this.#trust();
    clearTimeout(this.#timer);
    this.#socket = null;
    if (isFinal(code)) {
      this.#end();
      this.#on.link({ kind: "refused", code, reason });
      return;
    }
    const ms = pauseBefore(this.#tries, this.#chance());
    this.#tries += 1;
    this.#on.link({ kind: "waiting", ms, tries: this.#tries, code, reason });
    this.#timer = setTimeout(() => this.connect(), ms);
  }
}
