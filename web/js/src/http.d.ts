import type { Message } from "./chat.js";
import type { Place, Query } from "./index.js";
import type { Part } from "./reducer.js";

export interface HttpOptions {
  /** Custom keys for the agent. */
  body?: Record<string, unknown>;
  /** Fields of the address, asked anew for each request. */
  query?: Query | (() => Query | Promise<Query>);
  headers?: Record<string, string> | (() => Record<string, string> | Promise<Record<string, string>>);
  fetch?: typeof fetch;
  /** Ends the reading; the turn goes on. */
  signal?: AbortSignal;
  /** The most that one attempt to read on may wait for its answer, in ms (15,000): the next follows. */
  resumeMs?: number;
  /** Between 0 and 1; spreads the pauses between attempts. */
  chance?: () => number;
}

/**
 * Asks a chat agent over plain HTTP. Resolves when the server has the question on disk; rejects
 * with `ConnectionEnded` when it refuses, with `ConnectionLost` when nobody knows.
 */
export function askOverHttp(
  place: string | URL | Place,
  question: string | Message,
  options?: HttpOptions,
): Promise<HttpAnswer>;

/** The answer to one question. A loop over it that is left can be begun again where it was. */
export interface HttpAnswer extends AsyncIterable<{ type: string; [member: string]: unknown }> {
  readonly outcome: "completed" | "aborted" | null;
  /** The server's id of the turn. */
  readonly turn: string;
  readonly parts: readonly Part[];
  readonly text: string;
  /** Reads to the end and resolves with the text; rejects with `CallFailed` when the turn failed. */
  done(): Promise<string>;
}
