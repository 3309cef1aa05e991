import type { Part } from "./reducer.js";

export interface Message {
  id: string;
  role: string;
  parts: Part[];
  [member: string]: unknown;
}

export type Outcome = "completed" | "aborted" | "skipped" | "error";

export interface TurnState {
  id: string;
  /** The message that it writes; null before its first word. */
  messageId: string | null;
  /** The number of the next chunk. */
  next: number;
  phase: "asked" | "accepted" | "streaming" | "stopping" | "over";
  outcome?: Outcome;
}

/** A chat as a client has it. A value: an old one stays what it was. */
export interface Chat {
  readonly messages: readonly Message[];
  /** Oldest first. */
  readonly turns: readonly TurnState[];
  /** Questions that the server has not confirmed. */
  readonly unsent: readonly { id: string; messageId: string }[];
  /** By message id: how its turn ended, if unusually. */
  readonly notes: ReadonlyMap<string, { kind: "error" | "stopped" | "skipped"; text: string }>;
  readonly touched: ReadonlyMap<string, number>;
  readonly count: number;
}

export function emptyChat(): Chat;
/** The turn that runs or waits in front of all others; undefined when the chat is idle. */
export function activeTurn(chat: Chat): TurnState | undefined;
/** The chat with a question put in, shown at once. */
export function ask(chat: Chat, question: { id: string; message: Message }): Chat;
/** The chat where a question was put in that the server does not take; `text` says why. */
export function refused(chat: Chat, id: string, text: string): Chat;
export function stopping(chat: Chat, id: string): Chat;
/** An empty chat that still keeps late frames of its turns out. */
export function cleared(chat: Chat): Chat;
/** The chat with the server's list; `since`: the `count` when it was asked for. */
export function withTranscript(chat: Chat, list: Message[], since?: number): Chat;
/** The chat where a turn is over of whose end nothing is known. */
export function ended(chat: Chat, id: string): Chat;
/**
 * The chat after a frame; the same object when the frame is none of a chat's. `awaited`: ids of
 * turns whose end is asked for, so that they are not over because nothing runs.
 */
export function applyChatFrame(
  chat: Chat,
  frame: { type?: unknown; [member: string]: unknown },
  options?: { awaited?: Iterable<string> },
): Chat;
