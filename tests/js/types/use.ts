// What a TypeScript author writes must compile, and what is wrong must not.
import { AgentClient, CallFailed, type Run } from "culet";
import { activeTurn, applyChatFrame, emptyChat } from "culet/chat";
import { askOverHttp } from "culet/http";
import { useAgentClient, useAgentToolEvents } from "culet/react";

const client = new AgentClient<{ n: number }>({ agent: "Hub", name: "a", sub: [{ agent: "Writer", name: "w" }] });
const n: number | undefined = client.state?.n;
const pong: Promise<string> = client.call<string>("ping", ["hi"]);
client.subscribe(({ runs, chat }) => {
  const first: Run | undefined = runs.unboundRuns[0];
  return [first?.status === "completed", chat.messages[0]?.parts[0]?.type];
});
async function talk(): Promise<string | undefined> {
  for await (const item of client.stream<number>("count", [3])) item.toFixed();
  try {
    const { message } = await client.ask("hi", { body: { model: "x" } }).done;
    return message?.id;
  } catch (error) {
    return error instanceof CallFailed ? error.message : undefined;
  }
}
export function useBoth() {
  const { client: mine, state } = useAgentClient<{ n: number }>("/agents/hub/a", { query: async () => ({ token: "t" }) });
  const { getRunsForToolCall, waitingCalls } = useAgentToolEvents({ agent: mine });
  const asking: string | undefined = waitingCalls[0]?.runId;
  return [asking, state?.n, getRunsForToolCall("c")[0]?.milestones?.[0]?.name];
}
async function decide(): Promise<boolean> {
  await client.until(({ waitingCalls }) => waitingCalls.length > 0, { signal: AbortSignal.timeout(10) });
  const first: boolean[] = [];
  for (const { toolCallId, runId, state, input } of client.waitingCalls) {
    if (runId === undefined) await client.approveCall(toolCallId);
    else if (state === "approval-requested") first.push(await client.approveCall(toolCallId, input !== 0, { runId }));
    else first.push(await client.answerCall(toolCallId, { a: 1 }, { runId, error: "no" }));
  }
  return first.every((one) => one);
}
async function once(): Promise<string> {
  const answer = await askOverHttp("/agents/bot/a", "hi", { headers: async () => ({ authorization: "Bearer t" }) });
  for await (const chunk of answer) if (chunk.type === "text-delta") break;
  const chat = applyChatFrame(emptyChat(), { type: "cf_agent_chat_clear" });
  return `${await answer.done()} ${answer.outcome ?? "failed"} ${activeTurn(chat)?.phase}`;
}
// @ts-expect-error: an answer is made by asking
export const made = (await import("culet/http")).HttpAnswer;
// @ts-expect-error: only who names the run is told whether it was the first
export const early: Promise<boolean> = client.approveCall("c", true);
// @ts-expect-error: a state of another shape
void client.setState({ m: 1 });
// @ts-expect-error: no such status
export const wrong: Run["status"] = "done";
export const all = [n, pong, talk, decide, once];
