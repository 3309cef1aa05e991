// React hooks under test: a document from jsdom, a WebSocket from `ws`, a component per mount.
//
// A mount stands for a tab: `unmount` closes it as a reload does, `mount` again opens a new one.
import { JSDOM } from "jsdom";
import WebSocket from "ws";

const dom = new JSDOM("<!doctype html><body></body>", { url: "http://127.0.0.1/", pretendToBeVisual: true });
const { window } = dom;
const given = { window, document: window.document, navigator: window.navigator, WebSocket };
for (const [name, value] of Object.entries(given)) {
  Object.defineProperty(globalThis, name, { value, configurable: true, writable: true });
}

const { createElement, Suspense, useEffect } = await import("react");
const { createRoot } = await import("react-dom/client");

const LONGEST_WAIT_MS = 15_000;

/** Resolves when `holds()` does; looks whenever `watch` says that something happened. */
export function until(what, holds, watch) {
  return new Promise((resolve, reject) => {
    const look = () => {
      const value = holds();
      if (!value) return;
      clearTimeout(timer);
      leave();
      resolve(value);
    };
    const leave = watch(look);
    const timer = setTimeout(() => {
      leave();
      reject(new Error(`never happened: ${what}`));
    }, LONGEST_WAIT_MS);
    look();
  });
}

/** Mounts a component that calls `useIt`; gives `{now(), until(what, holds), seen, unmount()}`. */
export function mount(useIt) {
  const listeners = new Set();
  const seen = []; // every value that was rendered, oldest first
  const holder = document.createElement("div");
  document.body.append(holder);
  const root = createRoot(holder, {
    onUncaughtError: (error) => {
      throw error;
    },
  });
  function Probe() {
    const value = useIt();
    useEffect(() => {
      seen.push(value);
      for (const listener of listeners) listener();
    });
    return null;
  }
  root.render(createElement(Suspense, { fallback: null }, createElement(Probe)));
  const now = () => seen.at(-1);
  const watch = (listener) => {
    listeners.add(listener);
    return () => listeners.delete(listener);
  };
  return {
    now,
    seen,
    until: (what, holds) => until(what, () => seen.length > 0 && holds(now()), watch),
    unmount: () => {
      root.unmount();
      holder.remove();
    },
  };
}

/** Renders an element until the test is over; gives the node that holds it. */
export function mountNode(t, element) {
  const holder = document.createElement("div");
  document.body.append(holder);
  const root = createRoot(holder);
  root.render(element);
  t.after(() => {
    root.unmount();
    holder.remove();
  });
  return holder;
}

/** How `until` looks at a node: whenever something below it has changed. */
export const watched = (node) => (look) => {
  const observer = new window.MutationObserver(look);
  observer.observe(node, { subtree: true, childList: true, characterData: true });
  return () => observer.disconnect();
};

/** Closes the document; without this its timers keep the process. */
export function closeDocument() {
  dom.window.close();
}
