// The few verbs that the views use on the document. Text only ever goes in as text.

/** A new element: `props` are properties (or `aria-…`, `data-…` attributes), then children. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.includes("-") || name === "role") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

/** Touches the text only when it differs, so that selections and screen readers rest. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

/** Makes `nodes` the children of `parent`, in this order, moving only what must move. */
export function place(parent, nodes) {
  nodes.forEach((node, at) => {
    if (parent.children[at] !== node) parent.insertBefore(node, parent.children[at] ?? null);
  });
  while (parent.children.length > nodes.length) parent.lastElementChild.remove();
}

/** Views by key: made once, kept while their key is asked for, dropped after. */
export class Keyed {
  #views = new Map();
  #make;

  constructor(make) {
    this.#make = make;
  }

  /** The views of `keys`, in that order. */
  take(keys) {
    const next = new Map(keys.map((key) => [key, this.#views.get(key) ?? this.#make(key)]));
    this.#views = next;
    return [...next.values()];
  }
}

/** Whether a scrolling element stands at its end, give or take a line. */
export function atEnd(node) {
  return node.scrollHeight - node.scrollTop - node.clientHeight < 48;
}
