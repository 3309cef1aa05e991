// Hooks for React 18 and later.

import { useCallback, useEffect, useMemo, useRef, useState, useSyncExternalStore } from "react";

import { AgentClient, NOTHING } from "./agent.js";
import { applyAgentToolEvents, callsOfRuns, emptyState, runsOf } from "./reducer.js";

/** A client of an agent, from mount to unmount, with what it knows: `{client, ...snapshot}`. */
export function useAgentClient(place, options) {
  const key = JSON.stringify(place);
  const given = useRef(options);
  given.current = options;
  const [client, setClient] = useState(null);
  useEffect(() => {
    const made = new AgentClient(JSON.parse(key), given.current);
    setClient(made);
    return () => made.close();
  }, [key]);
  const subscribe = useCallback((changed) => client?.subscribe(changed) ?? (() => undefined), [client]);
  const snapshot = useSyncExternalStore(subscribe, () => client?.snapshot ?? NOTHING, () => NOTHING);
  return { client, ...snapshot };
}

/**
 * The runs of an agent as they go. `agent` is anything with `addEventListener("message")`: a
 * client of this package, or what `useAgent` of the npm package `agents` gives. The call and
 * the result have the form of that package's hook of the same name; `waitingCalls`, what the
 * runs and all below them wait for, is ours.
 */
export function useAgentToolEvents({ agent }) {
  const [state, setState] = useState(emptyState);
  const shown = useRef(null); // the client whose runs these are
  useEffect(() => {
    const known = agent?.snapshot?.runs;
    if (known) {
      // Another client is of another agent, maybe; a socket of theirs does not tell.
      const isOther = shown.current !== agent;
      shown.current = agent;
      setState((mine) => (isOther || Object.keys(mine.runsById).length === 0 ? known : mine));
    }
    let waiting = [];
    const fold = () => {
      const frames = waiting;
      waiting = [];
      setState((now) => applyAgentToolEvents(now, frames));
    };
    const hear = ({ data }) => {
      const frame = parsed(data);
      if (frame?.type !== "agent-tool-event") return;
      waiting.push(frame);
      if (waiting.length === 1) queueMicrotask(fold);
    };
    agent?.addEventListener("message", hear);
    return () => agent?.removeEventListener("message", hear);
  }, [agent]);
  const getRunsForToolCall = useCallback((toolCallId) => runsOf(state, toolCallId), [state]);
  const resetLocalState = useCallback(() => setState(emptyState()), []);
  return useMemo(() => {
    const { runsById, runsByToolCallId, unboundRuns } = state;
    const tables = { runsById, runsByToolCallId, unboundRuns, waitingCalls: callsOfRuns(state) };
    return { ...tables, getRunsForToolCall, resetLocalState };
  }, [state, getRunsForToolCall, resetLocalState]);
}

function parsed(data) {
  try {
    return typeof data === "string" ? JSON.parse(data) : null;
  } catch {
    return null;
  }
}
