import type { Chat, Message } from "./chat.js";
import type { AgentToolEvents, WaitingCall } from "./reducer.js";

export { applyAgentToolEvent, applyAgentToolEvents, callsOfRuns, emptyState, runsOf } from "./reducer.js";
export type { AgentToolEvents, Milestone, Part, Progress, Run, RunCall, RunStatus, WaitingCall } from "./reducer.js";
export type { Chat, Message, Outcome, TurnState } from "./chat.js";

export interface Step {
  /** A class name, `Worker` or `worker`. */
  agent: string;
  name: string;
}

export interface Place extends Step {
  /** `https://example.org`; without it the page's own. */
  host?: string;
  /** The agents below it, outermost first. */
  sub?: Step[];
  /** `/agents` unless the service has another. */
  prefix?: string;
}

/** `MyAgent` becomes `my-agent`. */
export function kebab(name: string): string;
export function agentPath(place: Omit<Place, "host">): string;

export type Link =
  | { kind: "connecting"; tries: number }
  | { kind: "open" }
  | { kind: "waiting"; ms: number; tries: number; code: number; reason: string }
  | { kind: "refused" | "closed"; code: number; reason: string };

/** What is known of an agent. A value: a new object when something changed. */
export interface Snapshot<State = unknown> {
  readonly link: Link;
  readonly identified: boolean;
  readonly name: string;
  /** Its class, in kebab case. */
  readonly agent: string;
  readonly state: State | undefined;
  readonly runs: AgentToolEvents;
  readonly chat: Chat;
  /** The history of the chat was read. */
  readonly loaded: boolean;
  /** The tool calls that wait: those of the last message, then those of runs at any depth. */
  readonly waitingCalls: readonly WaitingCall[];
}

export type Query = Record<string, string | null | undefined>;

export interface Options {
  /** It is a chat agent: keep its messages. */
  chat?: boolean;
  /** Fields of the address, asked anew for each attempt: a token that expires, for example. */
  query?: Query | (() => Query | Promise<Query>);
  WebSocket?: new (url: URL) => WebSocket;
  fetch?: typeof fetch;
  /** Between 0 and 1; spreads the pauses between attempts. */
  chance?: () => number;
}

export interface AnswerOptions {
  /** The message goes on when no call of it waits any more; true unless said. */
  autoContinue?: boolean;
  /** Forgets the answer; one that was sent is taken. */
  signal?: AbortSignal;
}

export interface Turn {
  id: string;
  /** `ended`: it is over, and how is not kept any more. Rejects with `CallFailed`. */
  done: Promise<{ outcome: "completed" | "aborted" | "skipped" | "ended"; message: Message | null }>;
}

/** One agent on a server, kept up to date over a socket that comes back by itself. */
export class AgentClient<State = unknown> extends EventTarget {
  constructor(place: string | URL | Place, options?: Options);
  readonly snapshot: Snapshot<State>;
  /** Resolves when the agent has said who it is; rejects when it never will. */
  readonly ready: Promise<this>;
  readonly state: State | undefined;
  readonly runs: AgentToolEvents;
  readonly messages: readonly Message[];
  readonly waitingCalls: readonly WaitingCall[];
  /** Calls the listener after each change; gives the function that ends it. */
  subscribe(listener: (snapshot: Snapshot<State>) => void): () => void;
  /** Resolves when it holds; it is asked after each change. Rejects when nothing will change any more. */
  until(holds: (snapshot: Snapshot<State>) => unknown, options?: { signal?: AbortSignal }): Promise<Snapshot<State>>;
  /** Rejects with `CallFailed`, or `ConnectionLost`: it may have run. */
  call<Result = unknown>(method: string, args?: unknown[], options?: { signal?: AbortSignal }): Promise<Result>;
  stream<Item = unknown, Result = unknown>(method: string, args?: unknown[], options?: { signal?: AbortSignal }): AsyncGenerator<Item, Result>;
  /** Rejects with `CallFailed` when the server refuses it. */
  setState(state: State): Promise<void>;
  /** Sends a message of the app; false when there is no open socket to take it. */
  send(message: string | object): boolean;
  ask(question: string | Message, options?: { id?: string; body?: Record<string, unknown> }): Turn;
  /** Without an id, the turn that runs. False when it cannot be sent. */
  stop(id?: string): boolean;
  clear(): boolean;
  /** With the `runId` of a call of a run: whether this answer was the first. Rejects with `CallFailed` when it is refused. */
  answerCall(toolCallId: string, output: unknown, options: AnswerOptions & { error?: string; runId: string }): Promise<boolean>;
  answerCall(toolCallId: string, output: unknown, options?: AnswerOptions & { error?: string; runId?: string }): Promise<boolean | undefined>;
  approveCall(toolCallId: string, approved: boolean, options: AnswerOptions & { runId: string }): Promise<boolean>;
  approveCall(toolCallId: string, approved?: boolean, options?: AnswerOptions & { runId?: string }): Promise<boolean | undefined>;
  /** Tries again now; an open connection has to show that it lives. */
  retry(): void;
  /** Closes for good; what waits rejects with `ConnectionEnded`. */
  close(code?: number, reason?: string): void;
}

/** The method, or the turn, failed; the message is what the server says in public. */
export class CallFailed extends Error {}
/** The socket went before the answer came: it may have happened or not. */
export class ConnectionLost extends Error {
  readonly code: number;
}
/** There will be no other connection: it was closed, or the server refuses. */
export class ConnectionEnded extends Error {
  readonly code: number;
}
/** The caller is wrong. */
export class UsageError extends Error {}
