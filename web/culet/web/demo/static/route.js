// Where a page stands: `?chat=NAME` is an assistant, `&sub=Class/Name/…` a child below it.
// Pure: addresses in, addresses out.

/** `MyAgent` becomes `my-agent`, an all upper case name is lower-cased as one word. */
export function kebab(name) {
  if (name === name.toUpperCase() && name !== name.toLowerCase()) {
    return name.toLowerCase().replaceAll("_", "-");
  }
  return name
    .replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`)
    .replace(/^-/, "")
    .replaceAll("_", "-")
    .replace(/-$/, "");
}

/** The place that a page address names: `{chat, sub: [{agent, name}, …]}`. */
export function readPlace(search) {
  const query = new URLSearchParams(search);
  const words = (query.get("sub") ?? "").split("/").map(decode);
  const sub = [];
  for (let at = 0; at + 1 < words.length; at += 2) {
    if (words[at] && words[at + 1]) sub.push({ agent: words[at], name: words[at + 1] });
  }
  return { chat: query.get("chat") || "default", sub };
}

function decode(word) {
  try {
    return decodeURIComponent(word);
  } catch {
    return word;
  }
}

/** The page address of a place. A slash inside a name is encoded twice, so that it splits nothing. */
export function pageOf({ chat, sub }) {
  const page = `/?chat=${encodeURIComponent(chat)}`;
  if (sub.length === 0) return page;
  const words = sub.flatMap(({ agent, name }) => [agent, name]).map(encodeURIComponent);
  return `${page}&sub=${encodeURIComponent(words.join("/")).replaceAll("%2F", "/")}`;
}

/** The gateway's path of a place, each name encoded once. */
export function agentPath({ chat, sub }) {
  const hops = sub.map(({ agent, name }) => `/sub/${kebab(agent)}/${encodeURIComponent(name)}`);
  return `/agents/assistant/${encodeURIComponent(chat)}${hops.join("")}`;
}
