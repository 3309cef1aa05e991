// Where an agent is: `/agents/CLASS/NAME`, and `/sub/CLASS/NAME` for each agent below. Pure.

import { UsageError } from "./errors.js";

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

function hop({ agent, name }) {
  // an address with these is another one: every reader of URLs goes up, or stays, encoded or not
  if ([".", "..", ""].includes(name)) throw new UsageError(`${JSON.stringify(name)} cannot be in an address`);
  return `${kebab(agent)}/${encodeURIComponent(name)}`;
}

/** The path of an agent, each name encoded once: `agentPath({agent, name, sub, prefix})`. */
export function agentPath({ agent, name, sub = [], prefix = "/agents" }) {
  return `${prefix}/${hop({ agent, name })}${sub.map((step) => `/sub/${hop(step)}`).join("")}`;
}

/** The same address over sockets (`ws`) or as a request (`http`), with query fields added. */
export function addressOf(place, scheme, query = {}) {
  const url = new URL(place, globalThis.location?.href);
  const secure = url.protocol === "https:" || url.protocol === "wss:";
  url.protocol = secure ? `${scheme}s:` : `${scheme}:`;
  for (const [field, value] of Object.entries(query)) {
    if (value !== null && value !== undefined) url.searchParams.set(field, value);
  }
  return url;
}

/** A URL or path as it is, `{host, agent, name, sub, prefix}` put together; or `UsageError`. */
export function placeText(place) {
  const steps = typeof place === "object" && place !== null && !(place instanceof URL);
  if (steps && !(place.agent && place.name)) throw new UsageError("a place needs `agent` and `name`");
  const text = steps ? `${place.host ?? ""}${agentPath(place)}` : String(place);
  try {
    addressOf(text, "ws");
  } catch {
    throw new UsageError(`${text} is no address here: give \`host\`, or a whole URL`);
  }
  return text;
}
