// The page's root: one place, one connection, one picture of it.
//
// Every frame goes through the pure folds (`chat.js`, `reducer.js`); what they return is all
// there is to show. On every new connection the page asks three things again, because it
// cannot know what it missed: is a turn running (resume), what is stored (history), and, when
// both are known, whether a question of its own ever arrived.

import {
  activeTurn,
  applyChatFrame,
  ask,
  askAgain,
  cleared,
  emptyChat,
  messagesToSend,
  stopping,
  withTranscript,
} from "./chat.js";
import { Client } from "./client.js";
import { applyAgentToolEvent, emptyState } from "./reducer.js";
import { agentPath, readPlace } from "./route.js";
import { View } from "./view.js";

/** Of the gateway's 1 MiB a message: room for the envelope and for escapes. */
const BODY_LIMIT = 400_000;
const HISTORY_RETRY_MS = 1_000;

const here = readPlace(location.search);
const model = {
  chat: emptyChat(),
  runs: emptyState(),
  library: null,
  link: { kind: "connecting", tries: 0 },
  loaded: false,
};
let connection = 0; // counts them; what an earlier one asked for is void
let probe = null;
let acked = new Set(); // request ids whose replay this connection has asked for
const sentOn = new Map(); // request id to the connection that carried the question

const client = new Client(agentPath(here), {
  open: () => {
    connection += 1;
    acked = new Set();
    resume();
    loadHistory(connection);
  },
  frame: heard,
  link: (link) => change({ link }),
});
const view = new View(here, { ask: asked, stop, clear, retry: () => client.retry() });

function change(members) {
  Object.assign(model, members);
  view.show(model);
}

// ---------------------------------------------------------------------------- speaking

const newIds = () => ({ id: crypto.randomUUID(), messageId: crypto.randomUUID() });

function asked(text) {
  const ids = newIds();
  change({ chat: ask(model.chat, { ...ids, text }) });
  sendQuestion(ids);
}

/** Without an open socket this does nothing: the next connection asks for what is unsent. */
function sendQuestion({ id, messageId }) {
  const messages = messagesToSend(model.chat, messageId, BODY_LIMIT);
  const body = JSON.stringify({ messages, trigger: "submit-message" });
  const frame = { type: "cf_agent_use_chat_request", id, init: { method: "POST", body } };
  if (client.send(frame)) sentOn.set(id, connection);
}

function stop() {
  const turn = activeTurn(model.chat);
  if (turn && client.send({ type: "cf_agent_chat_request_cancel", id: turn.id })) {
    change({ chat: stopping(model.chat, turn.id) });
  }
}

function clear() {
  if (!client.send({ type: "cf_agent_chat_clear" })) return;
  change({ chat: cleared(model.chat), runs: emptyState() });
}

// --------------------------------------------------------------------------- listening

function heard(frame) {
  const runs = applyAgentToolEvent(model.runs, frame);
  if (runs !== model.runs) return change({ runs });
  if (frame.type === "cf_agent_state") return change({ library: frame.state?.library ?? null });
  const isNone = frame.type === "cf_agent_stream_resume_none";
  if (isNone && frame.probeId !== undefined && frame.probeId !== probe) return undefined;
  if (frame.type === "cf_agent_stream_resuming") acknowledge(frame.id);
  const chat = applyChatFrame(model.chat, frame);
  if (chat === model.chat) return undefined;
  const ended = activeTurn(model.chat) && !activeTurn(chat);
  change(frame.type === "cf_agent_chat_clear" ? { chat, runs: emptyState() } : { chat });
  // It ended while nobody listened: what it left is in the history, maybe newer than ours.
  if (ended && isNone) loadHistory(connection);
  return undefined;
}

/** A server may offer a turn twice, on connect and as an answer; its replay is wanted once. */
function acknowledge(id) {
  if (acked.has(id)) return;
  acked.add(id);
  client.send({ type: "cf_agent_stream_resume_ack", id });
}

function resume() {
  probe = crypto.randomUUID();
  client.send({ type: "cf_agent_stream_resume_request", probeId: probe });
}

async function loadHistory(of) {
  const since = model.chat.count;
  let messages;
  try {
    messages = await client.history();
  } catch {
    setTimeout(() => of === connection && client.isOpen && loadHistory(of), HISTORY_RETRY_MS);
    return;
  }
  if (of !== connection) return;
  change({ chat: withTranscript(model.chat, messages, since), loaded: true });
  for (const question of model.chat.unsent) {
    if (sentOn.get(question.id) === connection) continue; // on its way, not lost
    const ids = newIds();
    change({ chat: askAgain(model.chat, question, ids) });
    sendQuestion(ids);
  }
}

change({});
client.connect();
