// What a TypeScript author writes must compile, and what is wrong must not.
import { AgentClient, CallFailed, type Run } from "../../../web/js/src/index.js";
import { useAgentClient, useAgentToolEvents } from "../../../web/js/src/react.js";

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
  const { getRunsForToolCall } = useAgentToolEvents({ agent: mine });
  return [state?.n, getRunsForToolCall("c")[0]?.milestones?.[0]?.name];
}
// @ts-expect-error: a state of another shape
void client.setState({ m: 1 });
// @ts-expect-error: no such status
export const wrong: Run["status"] = "done";
export const all = [n, pong, talk];
