/** A part of a message, as the AI SDK's UIMessage has it. */
export type Part = { type: string; [member: string]: unknown };

export type RunStatus = "running" | "completed" | "error" | "aborted" | "interrupted";

export interface Progress {
  /** 0 to 1. */
  fraction?: number;
  message?: string;
  phase?: string;
  milestone?: string;
  data?: unknown;
  /** The sender's clock, ms since 1970. */
  at?: number;
}

export interface Milestone {
  name: string;
  sequence: number;
  at: number;
  data?: unknown;
}

export interface Run {
  runId: string;
  agentType: string;
  parentToolCallId?: string;
  order: number;
  status: RunStatus;
  parts: Part[];
  subAgent: { agent: string; name: string };
  inputPreview?: unknown;
  display?: unknown;
  summary?: string;
  error?: string;
  reason?: string;
  childStillRunning?: boolean;
  progress?: Progress;
  milestones?: Milestone[];
}

/** A tool call that waits for an answer. */
export interface WaitingCall {
  toolCallId: string;
  toolName: string;
  /** `input-available` wants a result, `approval-requested` a yes or a no. */
  state: string;
  input?: unknown;
  /** In place of an input that is too large to be told. */
  inputShape?: unknown;
  /** It may have been carried out already: a yes carries it out once more. */
  uncertain?: boolean;
  /** The run that asks, however far below; none where it is a call of the chat's own message. */
  runId?: string;
  [member: string]: unknown;
}

export interface RunCall extends WaitingCall {
  runId: string;
}

/** The runs of one agent as a client has them. A value: an old one stays what it was. */
export interface AgentToolEvents {
  readonly runsById: Readonly<Record<string, Run>>;
  /** By `order`, then by run id. */
  readonly runsByToolCallId: Readonly<Record<string, Run[]>>;
  readonly unboundRuns: readonly Run[];
  readonly asked: Readonly<Record<string, readonly RunCall[]>>;
  readonly seen: unknown;
  /** Ends that came after a different end of the same run. */
  readonly protocolErrors: number;
}

/** The state before any frame. */
export function emptyState(): AgentToolEvents;

/** The state after a frame, whatever it is; the same object when it changes nothing. */
export function applyAgentToolEvent(state: AgentToolEvents, frame: unknown): AgentToolEvents;

/** The same for many frames, at the cost of one. */
export function applyAgentToolEvents(state: AgentToolEvents, frames: Iterable<unknown>): AgentToolEvents;

/** The calls that runs, and all below them, wait for: each once. */
export function callsOfRuns(state: AgentToolEvents): RunCall[];

/** The runs that one tool call dispatched, in their stable order. */
export function runsOf(state: AgentToolEvents, toolCallId: string): Run[];

/** Whether a chunk is of a kind that parts are made of. */
export function isPartChunk(chunk: unknown): boolean;

/** The parts of a message after a UI chunk; the same list when it changes nothing. */
export function applyChunkToParts(parts: readonly Part[], chunk: unknown): Part[];

export function siblingOrder(a: Run, b: Run): number;
export function byCodePoints(a: string, b: string): number;
