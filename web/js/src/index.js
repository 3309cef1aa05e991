export { agentPath, kebab } from "./address.js";
export { AgentClient } from "./agent.js";
export { CallFailed, ConnectionEnded, ConnectionLost, UsageError } from "./errors.js";
export { applyAgentToolEvent, applyAgentToolEvents, callsOfRuns, emptyState, runsOf } from "./reducer.js";
