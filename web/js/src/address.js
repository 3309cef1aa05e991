// Where an agent is: `/agents/CLASS/NAME`, and `/sub/CLASS/NAME` for each agent below. Pure.

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

const hop = ({ agent, name }) => `${kebab(agent)}/${encodeURIComponent(name)}`;

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
