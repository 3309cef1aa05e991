// The tool calls that wait for a person, or for a client that carries them out. Pure.

import { callsOfRuns } from "./reducer.js";

const ASKING = ["input-available", "approval-requested"];

/**
 * What waits: calls of the last message, then those of runs, however far below. One that is
 * `input-available` wants a result, one that is `approval-requested` a yes or a no. A call of
 * a run has its `runId`; one of the message that has become a run waits for nobody. While a
 * turn streams, the server may be about to carry out a call of the message itself.
 */
export function waitingCalls({ chat, runs }) {
  const parts = chat.messages.at(-1)?.parts ?? [];
  const waits = ({ toolCallId, state }) =>
    typeof toolCallId === "string" && ASKING.includes(state) && !runs.runsByToolCallId[toolCallId];
  return [...parts.filter(waits), ...callsOfRuns(runs)];
}

/** The frame that gives a tool call its result, or the error it ended in. */
export function resultFrame(toolCallId, output, { error, autoContinue = true, runId } = {}) {
  const told = error === undefined ? { output } : { errorText: error };
  const state = error === undefined ? "output-available" : "output-error";
  const frame = { type: "cf_agent_tool_result", toolCallId, toolName: "", state };
  return { ...frame, ...told, autoContinue, runId };
}

/** The frame that says whether a tool call may run. */
export function approvalFrame(toolCallId, approved = true, { autoContinue = true, runId } = {}) {
  return { type: "cf_agent_tool_approval", toolCallId, approved, autoContinue, runId };
}
