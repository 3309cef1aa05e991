// The few verbs that the views use on the document. Text only ever goes in as text.

/** A new element: `props` are properties (or `aria-…`, `data-…` attributes), then children. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.includes("-") || name === "role") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

export const byId = (id) => document.getElementById(id);

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A list whose rows live as long as their key is shown: focus and selection stay. */
export class Rows {
  #views = new Map();
  #list;

  constructor(list) {
    this.#list = list;
  }

  /** Shows `items` in this order; `make(item)` returns `{node, update(item)}`. */
  show(items, keyOf, make) {
    const next = new Map();
    for (const item of items) {
      const key = keyOf(item);
      const view = this.#views.get(key) ?? make(item);
      view.update(item);
      next.set(key, view);
    }
    this.#views = next;
    [...next.values()].forEach(({ node }, at) => {
      if (this.#list.children[at] !== node) this.#list.insertBefore(node, this.#list.children[at] ?? null);
    });
    while (this.#list.children.length > next.size) this.#list.lastElementChild.remove();
  }

  clear() {
    this.show([], String, null);
  }
}

/** `3 s`, `4 min`, `2.5 h`, `3 d`. */
export function span(ms) {
  const s = Math.max(0, ms) / 1000;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 120) return `${Math.round(s)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${(s / 3600).toFixed(1)} h`;
  return `${Math.round(s / 86400)} d`;
}

export function bytes(count) {
  if (count < 1024) return `${count} B`;
  if (count < 1 << 20) return `${(count / 1024).toFixed(count < 10240 ? 1 : 0)} KiB`;
  return `${(count / (1 << 20)).toFixed(1)} MiB`;
}

export const clock = (ms) => new Date(ms).toLocaleTimeString([], { hour12: false });
export const moment = (ms) => new Date(ms).toLocaleString([], { hour12: false });
export const many = (count, one, more = `${one}s`) => `${count} ${count === 1 ? one : more}`;
