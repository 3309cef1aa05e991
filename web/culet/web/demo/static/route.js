// Where a page stands: `?chat=NAME` is an assistant, `&sub=Class/Name/…` a child below it. With
// `?agent=CLASS` it is a chat agent of another class.
// Pure: addresses in, addresses out.

import { agentPath } from "./culet/address.js";

/** The place that a page address names: `{agent?, chat, sub: [{agent, name}, …]}`. */
export function readPlace(search) {
  const query = new URLSearchParams(search);
  const words = (query.get("sub") ?? "").split("/").map(decode);
  const sub = [];
  for (let at = 0; at + 1 < words.length; at += 2) {
    if (words[at] && words[at + 1]) sub.push({ agent: words[at], name: words[at + 1] });
  }
  const agent = query.get("agent");
  return { ...(agent && { agent }), chat: query.get("chat") || "default", sub };
}

function decode(word) {
  try {
    return decodeURIComponent(word);
  } catch {
    return word;
  }
}

/** The page address of a place. A slash inside a name is encoded twice, so that it splits nothing. */
export function pageOf({ agent, chat, sub }) {
  const of = agent ? `agent=${encodeURIComponent(agent)}&` : "";
  const page = `/?${of}chat=${encodeURIComponent(chat)}`;
  if (sub.length === 0) return page;
  const words = sub.flatMap(({ agent, name }) => [agent, name]).map(encodeURIComponent);
  return `${page}&sub=${encodeURIComponent(words.join("/")).replaceAll("%2F", "/")}`;
}

/** The gateway's path of a place. */
export function assistantPath({ agent = "assistant", chat, sub }) {
  return agentPath({ agent, name: chat, sub });
}
