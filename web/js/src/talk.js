// The chat half of a client: what was asked, what streams, what is stored.
//
// On every new connection three things are asked again, because nobody knows what was missed:
// which turn runs (resume), what is stored (history), and, when both are known, whether a
// question ever arrived and how its turn has ended.

import {
  activeTurn,
  applyChatFrame,
  ask,
  cleared,
  ended,
  refused,
  stopping,
  withTranscript,
} from "./chat.js";
import { CallFailed } from "./errors.js";
import { sizeOf } from "./line.js";
import { emptyState } from "./reducer.js";
import { uuid, withResolvers } from "./small.js";

const TOO_LARGE = 1009;
const HISTORY_RETRY_MS = 1_000;
const REPLAY_MS = 5_000; // in which a replay has begun, where there is one

export class Talk {
  #host;
  #turns = new Map(); // request id to {body, reply, resolve, reject}
  #connection = 0; // counts them; what an earlier one asked for is void
  #probe = null; // what this connection has asked: which turn runs
  #runs = null; // and what it was told: a request id, or "none"
  #acked = new Set(); // request ids whose replay this connection has asked for
  #heardOf = new Set(); // request ids of which this connection has brought something
  #sentOn = new Map(); // request id to the connection that carried the question, and its size

  /**
   * `host`: `send(frame)`, whether an open socket took it, `isOpen()`, `history()`, which
   * promises the stored messages, `known()`, the snapshot, and `change(members)` of it.
   */
  constructor(host) {
    this.#host = host;
  }

  get #chat() {
    return this.#host.known().chat;
  }

  /** Asks a question; gives `{id, done}`. */
  ask(question, { id = uuid(), body = {} } = {}) {
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
    this.#host.change({ chat: ask(this.#chat, { id, message }) });
    this.#sendQuestion({ id, messageId: message.id });
    return { id, done: turn.promise };
  }

  /** Without an open socket this does nothing: the next connection asks for what is unsent. */
  #sendQuestion({ id, messageId }) {
    const messages = this.#chat.messages.filter((message) => message.id === messageId);
    const inner = { ...this.#turns.get(id)?.body, messages, trigger: "submit-message" };
    const init = { method: "POST", body: JSON.stringify(inner) };
    const text = JSON.stringify({ type: "cf_agent_use_chat_request", id, init });
    if (this.#host.send(text)) this.#sentOn.set(id, { connection: this.#connection, size: sizeOf(text) });
  }

  /** The socket has gone. A question that was too large would only end the next one as well. */
  lost({ code, largest }) {
    if (code !== TOO_LARGE) return;
    for (const { id } of this.#chat.unsent) {
      const { connection, size } = this.#sentOn.get(id) ?? {};
      if (connection !== this.#connection || size < largest) continue;
      this.#folded({ chat: refused(this.#chat, id, "the question is larger than the server takes") });
    }
  }

  /** Stops a turn; without an id the one that runs. False when it cannot be sent. */
  stop(id = activeTurn(this.#chat)?.id) {
    if (id === undefined || !this.#host.send({ type: "cf_agent_chat_request_cancel", id })) return false;
    this.#host.change({ chat: stopping(this.#chat, id) });
    return true;
  }

  /** Clears the history, on the server as well. False when it cannot be sent. */
  clear() {
    if (!this.#host.send({ type: "cf_agent_chat_clear" })) return false;
    this.#folded({ chat: cleared(this.#chat), runs: emptyState() });
    return true;
  }

  /** A socket is open. */
  opened() {
    this.#connection += 1;
    [this.#acked, this.#heardOf, this.#runs] = [new Set(), new Set(), null];
    this.#probe = uuid();
    this.#host.send({ type: "cf_agent_stream_resume_request", probeId: this.#probe });
    this.#loadHistory(this.#connection);
  }

  /** There will be no other socket. */
  end(error) {
    for (const turn of this.#turns.values()) turn.reject(error);
    this.#turns.clear();
  }

  /** One frame that is no other half's. */
  taken(frame) {
    const isNone = frame.type === "cf_agent_stream_resume_none";
    if (isNone && frame.probeId !== undefined && frame.probeId !== this.#probe) return;
    if (frame.type === "cf_agent_use_chat_response") this.#heardOf.add(frame.id);
    if (frame.type === "cf_agent_stream_resuming") this.#acknowledge(frame.id);
    const before = this.#chat;
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
    const ids = this.#awaited(this.#chat).filter((id) => id !== this.#runs && !this.#acked.has(id));
    for (const id of ids) this.#acknowledge(id);
    if (this.#runs !== "none" || ids.length === 0) return;
    const [of, heard] = [this.#connection, this.#heardOf];
    setTimeout(() => {
      const silent = this.#awaited(this.#chat).filter((id) => ids.includes(id) && !heard.has(id));
      if (of !== this.#connection || silent.length === 0) return;
      this.#folded({ chat: silent.reduce(ended, this.#chat) }, { known: this.#host.known().loaded });
    }, REPLAY_MS);
  }

  /** `known`: what the server has stored is here, so a turn that is over has its message. */
  #folded(members, { known = false } = {}) {
    this.#host.change(members);
    const { turns, messages, notes } = members.chat;
    for (const { id, phase, outcome, messageId } of turns) {
      const turn = this.#turns.get(id);
      if (turn === undefined || phase !== "over" || (outcome === undefined && !known)) continue;
      this.#turns.delete(id);
      this.#sentOn.delete(id);
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
    this.#host.send({ type: "cf_agent_stream_resume_ack", id });
  }

  async #loadHistory(of) {
    const since = this.#chat.count;
    let messages;
    try {
      messages = await this.#host.history();
    } catch {
      const again = () => of === this.#connection && this.#host.isOpen() && this.#loadHistory(of);
      setTimeout(again, HISTORY_RETRY_MS);
      return;
    }
    if (of !== this.#connection) return;
    const chat = withTranscript(this.#chat, messages, since);
    this.#folded({ chat, loaded: true }, { known: true });
    for (const question of this.#chat.unsent) {
      if (this.#sentOn.get(question.id)?.connection !== of) this.#sendQuestion(question); // it was lost
    }
    this.#recall(); // questions that did arrive are known now
  }
}
