// One connection to one agent, kept up by itself.
//
// The socket carries JSON text frames both ways. When it drops, the next attempt comes after
// a pause that grows; a close code that says "do not come back" ends it. What was sent while
// no socket was open is not queued here: whoever asks again on `onOpen` knows best what is
// still true. History is a plain GET beside the socket.

const FIRST_PAUSE_MS = 400;
const LONGEST_PAUSE_MS = 5_000;
const GROWTH = 1.6;
const JITTER = 0.2;
const HANDSHAKE_MS = 8_000;

/** 1008 and 4000-4999: the server will not have this client back. */
export function isFinal(code) {
  return code === 1008 || (code >= 4000 && code <= 4999);
}

/** The pause before attempt `tries` (from 0), in ms; `chance` is in [0, 1). */
export function pauseBefore(tries, chance) {
  const pause = Math.min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS * GROWTH ** tries);
  return pause * (1 + JITTER * (2 * chance - 1));
}

export class Client {
  #path;
  #on;
  #id = crypto.randomUUID();
  #socket = null;
  #tries = 0;
  #timer = null;
  #ended = false;

  /**
   * `path`: the agent's path, such as `/agents/assistant/default`. `on`: `open()`,
   * `frame(object)` and `link({kind, …})`, where kind is `connecting`, `open`,
   * `waiting` (with `ms`) or `refused` (with `code` and `reason`).
   */
  constructor(path, on) {
    this.#path = path;
    this.#on = on;
    addEventListener("online", () => this.retry());
  }

  connect() {
    clearTimeout(this.#timer);
    this.#on.link({ kind: "connecting", tries: this.#tries });
    const url = new URL(this.#path, location.href);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    url.searchParams.set("_pk", this.#id);
    const socket = new WebSocket(url);
    this.#socket = socket;
    this.#timer = setTimeout(() => socket.close(), HANDSHAKE_MS);
    socket.addEventListener("open", () => this.#opened(socket));
    socket.addEventListener("message", (event) => this.#heard(socket, event.data));
    socket.addEventListener("close", (event) => this.#closed(socket, event));
  }

  /** Tries again now, if a pause is running. */
  retry() {
    if (this.#socket === null && !this.#ended) this.connect();
  }

  get isOpen() {
    return this.#socket?.readyState === WebSocket.OPEN;
  }

  /** Sends a frame; false when there is no open socket to take it. */
  send(frame) {
    if (!this.isOpen) return false;
    this.#socket.send(JSON.stringify(frame));
    return true;
  }

  /** The messages that the agent has stored; throws when it does not answer. */
  async history() {
    const answer = await fetch(`${this.#path}/get-messages`, { cache: "no-store" });
    if (!answer.ok) throw new Error(`history: HTTP ${answer.status}`);
    const messages = await answer.json();
    return Array.isArray(messages) ? messages : [];
  }

  #opened(socket) {
    if (socket !== this.#socket) return;
    clearTimeout(this.#timer);
    this.#on.link({ kind: "open" });
    this.#on.open();
  }

  #heard(socket, text) {
    if (socket !== this.#socket || typeof text !== "string") return;
    this.#tries = 0;
    let frame = null;
    try {
      frame = JSON.parse(text);
    } catch {
      return; // text that is not JSON belongs to somebody else
    }
    if (frame !== null && typeof frame === "object") this.#on.frame(frame);
  }

  #closed(socket, { code, reason }) {
    if (socket !== this.#socket) return;
    clearTimeout(this.#timer);
    this.#socket = null;
    if (isFinal(code)) {
      this.#ended = true;
      this.#on.link({ kind: "refused", code, reason });
      return;
    }
    const ms = pauseBefore(this.#tries, Math.random());
    this.#tries += 1;
    this.#on.link({ kind: "waiting", ms, tries: this.#tries });
    this.#timer = setTimeout(() => this.connect(), ms);
  }
}
