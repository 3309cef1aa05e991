// The page's root: one place, one client, one picture of what it knows.

import { AgentClient } from "./culet/agent.js";
import { assistantPath, readPlace } from "./route.js";
import { View } from "./view.js";

const here = readPlace(location.search);
const client = new AgentClient(assistantPath(here), { chat: true });
const view = new View(here, {
  ask: (text) => client.ask(text).done.catch(() => undefined), // a failed turn says so itself
  answer: ({ toolCallId, runId }, approved) => client.approveCall(toolCallId, approved, { runId }),
  stop: () => client.stop(),
  clear: () => client.clear(),
  retry: () => client.retry(),
});
const show = (known) => view.show({ ...known, library: known.state?.library ?? null });

client.subscribe(show);
show(client.snapshot);
