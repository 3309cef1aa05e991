import type { AgentClient, Options, Place, Snapshot } from "./index.js";
import type { Run, RunCall } from "./reducer.js";

/** A client of an agent, from mount to unmount, with what it knows; null before the mount. */
export function useAgentClient<State = unknown>(
  place: string | Place,
  options?: Options,
): { client: AgentClient<State> | null } & Snapshot<State>;

interface Hears {
  addEventListener(type: "message", listener: (event: any) => void): void;
  removeEventListener(type: "message", listener: (event: any) => void): void;
}

/** The runs of an agent as they go. Takes a client of this package, or a socket of another. */
export function useAgentToolEvents(options: { agent: Hears | null | undefined }): {
  runsById: Readonly<Record<string, Run>>;
  runsByToolCallId: Readonly<Record<string, Run[]>>;
  unboundRuns: readonly Run[];
  /** What the runs, and all below them, wait for. */
  waitingCalls: readonly RunCall[];
  getRunsForToolCall(toolCallId: string): Run[];
  resetLocalState(): void;
};
