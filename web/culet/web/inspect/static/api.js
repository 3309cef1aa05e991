// What the page asks of its server: pages of lists, one stream of events, one verb.

const url = (name) => new URL(`inspect/api/${name}`, document.baseURI);

async function answered(response) {
  if (!response.ok) throw new Error(`${response.status} ${(await response.text()).slice(0, 200)}`);
  return response.json();
}

export async function read(name, query = {}) {
  const asked = url(name);
  for (const [key, value] of Object.entries(query)) {
    if (value !== null && value !== undefined) asked.searchParams.set(key, value);
  }
  return answered(await fetch(asked));
}

export async function act(root, verb, id) {
  const body = JSON.stringify({ root: [root.class, root.name], act: verb, id: Number(id) });
  const headers = { "content-type": "application/json" };
  return answered(await fetch(url("act"), { method: "POST", headers, body }));
}

/** Follows the events: `on.event(event)`, `on.lost(count)`, `on.link(kind)`. */
export function follow(on) {
  const source = new EventSource(url("events"));
  source.onopen = () => on.link("open");
  source.onerror = () => on.link(source.readyState === EventSource.CLOSED ? "refused" : "waiting");
  source.onmessage = (message) => on.event(JSON.parse(message.data));
  source.addEventListener("lost", (message) => on.lost(Number(message.data)));
}
