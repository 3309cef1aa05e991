// The inspector: a root and a tab are chosen, their page is read anew when something happens.
import { act, follow, read } from "./api.js";
import { byId, bytes, el, many, Rows, setText, span } from "./dom.js";
import { TABS } from "./views.js";

const EVENTS_SHOWN = 200;
const REST_MS = 2000; // between two looks when nothing happens
const SOON_MS = 400; // after something did

const state = { root: null, tab: "tree", after: null, roots: [], more: [], busy: false, again: false, find: "", opened: null };
const page = { now: Date.now(), window: { from: 0, to: 1 }, ask };
const rows = new Rows(byId("rows"));
const rootRows = new Rows(byId("roots"));
const events = [];
let eventCount = 0;
let lost = 0;
let timer = 0;

// ---- what is chosen is in the address, so that it can be kept and sent

function chosen() {
  const [tab, cls, ...name] = location.hash.slice(1).split("/");
  return { tab: Object.hasOwn(TABS, tab) ? tab : "tree", root: cls ? { class: cls, name: decoded(name.join("/")) } : null };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // somebody has typed it
  }
}

const address = (tab, root) => `#${tab}${root ? `/${root.class}/${encodeURIComponent(root.name)}` : ""}`;
const same = (a, b) => a !== null && b !== null && a.class === b.class && a.name === b.name;

function choose() {
  const next = chosen();
  state.tab = next.tab;
  state.root = next.root ?? state.roots[0] ?? null;
  state.after = null;
  if (!same(state.opened, state.root)) state.opened = null;
  page.root = state.root;
  rows.clear();
  for (const link of byId("tabs").children) {
    const is = link.dataset.tab === state.tab;
    link.href = address(link.dataset.tab, state.root);
    link.setAttribute("aria-selected", String(is));
    link.tabIndex = is ? 0 : -1;
    if (is) byId("panel").setAttribute("aria-labelledby", `root-title ${link.id}`);
  }
  setText(byId("root-title"), state.root ? `${state.root.class}/${state.root.name}` : "No root is known");
  showRoots();
  refresh();
}

// ---- lists

function showRoots() {
  rootRows.show(state.roots, (root) => `${root.class}/${root.name}`, () => {
    const name = el("span", { className: "name" });
    const about = el("span", { className: "facts" });
    const link = el("a", {}, name, about);
    return {
      node: el("li", {}, link),
      update(root) {
        setText(name, `${root.class}/${root.name}`);
        setText(about, root.state === "open" ? many(root.agents, "agent") : sleeping(root));
        link.href = address(state.tab, root);
        const was = link.hasAttribute("aria-current");
        if (same(root, state.root)) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
        if (!was && same(root, state.root)) requestAnimationFrame(() => link.scrollIntoView({ block: "nearest" }));
      },
    };
  });
}

function sleeping({ due_at: due }) {
  return due ? `asleep, due in ${span(due - page.now)}` : "asleep";
}

async function readRoots(after = null) {
  const find = state.find;
  const found = await read("roots", { after, find: find || null });
  if (find !== state.find) return; // somebody types on
  page.now = found.now;
  if (after) state.more.push(found);
  else {
    state.first = found;
    if (!found.after) state.more = [];
  }
  const last = state.more.at(-1) ?? state.first;
  const known = new Map([state.first, ...state.more].flatMap(({ rows: page }) => page).map((it) => [it.class + "/" + it.name, it]));
  state.roots = [...known.values()];
  byId("no-roots").hidden = state.roots.length > 0;
  setText(byId("no-roots"), find ? "No root has this in its name." : "There are none yet: the first call or client makes one.");
  byId("more-roots").hidden = !last.after;
  byId("more-roots").dataset.after = last.after ?? "";
  const { trees, sleeping_trees: sleeping, nodes, connections, remnants } = found.counts;
  const told = [many(trees, "open root"), `${sleeping} asleep`, many(nodes, "agent"), many(connections, "socket")];
  setText(byId("counts"), [...told, ...(remnants ? [many(remnants, "remnant")] : [])].join(" · "));
}

/** The events of one root, and of the whole kernel, the newest first. */
function heard(root) {
  const own = `${root.class}/${root.name}`;
  return events.filter((told) => (told.root ?? own) === own).reverse();
}

function describe(found) {
  const count = many(found.rows.length, ...TABS[state.tab].noun);
  const where = found.after || state.after ? ", on this page" : "";
  if (state.tab !== "tree") return count + where;
  return `${count}, ${bytes(found.rows.reduce((total, row) => total + row.bytes, 0))} in their files${where}`;
}

async function readPage() {
  const { root, tab, after } = state;
  if (!root || tab === "events") return { rows: root ? heard(root) : [], after: null };
  return read(tab, { class: root.class, name: root.name, after, open: same(state.opened, root) ? 1 : null });
}

function show(found) {
  const { key, make, nothing } = TABS[state.tab];
  page.now = found.now ?? Date.now();
  const list = state.tab === "tree" ? [...found.rows].sort((a, b) => (a.path < b.path ? -1 : 1)) : found.rows;
  const begun = list.map((it) => it.started_at ?? page.now);
  const ended = list.map((it) => it.completed_at ?? page.now);
  page.window = { from: Math.min(page.now - 1, ...begun), to: Math.max(...ended, 0) || page.now };
  rows.show(list, key, () => make(page));
  byId("rows").dataset.tab = state.tab;
  setText(byId("about"), found.asleep ? "asleep" : describe(found));
  byId("asleep").hidden = !found.asleep;
  byId("nothing").hidden = list.length > 0 && !(state.tab === "events" && lost);
  setText(byId("nothing"), found.asleep ? ASLEEP : state.tab === "events" && lost ? `${many(lost, "event")} came too fast and are not shown.` : nothing);
  byId("first").hidden = !state.after;
  byId("next").hidden = !found.after;
  byId("next").dataset.after = found.after ?? "";
}

/** Reads what is chosen; one look at a time, and one more when it was asked for meanwhile. */
async function refresh() {
  if (state.busy) {
    state.again = true;
    return;
  }
  state.busy = true;
  clearTimeout(timer);
  try {
    await readRoots();
    if (!state.root && state.roots.length) {
      state.busy = false;
      choose();
      return;
    }
    showRoots();
    const { root, tab, after } = state;
    const found = await readPage();
    if (root === state.root && tab === state.tab && after === state.after) show(found);
    byId("problem").hidden = true;
  } catch (error) {
    setText(byId("problem"), `This could not be read, what you see may be old; it is tried again every ${REST_MS / 1000} s. (${error.message})`);
    byId("problem").hidden = false;
  }
  state.busy = false;
  const wait = state.again ? SOON_MS : REST_MS;
  state.again = false;
  timer = setTimeout(lookAgain, wait);
}

function lookAgain() {
  if (document.hidden) timer = setTimeout(lookAgain, REST_MS);
  else refresh();
}

// ---- what may be done

function ask({ title, text, yes, verb, id }) {
  const dialog = byId("ask");
  const root = state.root;
  setText(byId("ask-title"), title);
  setText(byId("ask-text"), text);
  setText(byId("ask-yes"), yes);
  byId("ask-yes").dataset.tone = verb.startsWith("cancel") ? "bad" : "plain";
  byId("ask-no").onclick = () => dialog.close();
  byId("ask-yes").onclick = async () => {
    dialog.close();
    say("…");
    try {
      const { done } = await act(root, verb, id);
      say(done ? "Done." : "It was over already: nothing was changed.");
    } catch (error) {
      say(`That failed: ${error.message}`, "bad");
    }
    refresh();
  };
  dialog.showModal();
}

let saying = 0;
function say(text, tone = "plain") {
  clearTimeout(saying);
  setText(byId("said"), text);
  byId("said").dataset.tone = tone;
  byId("said").hidden = false;
  saying = setTimeout(() => (byId("said").hidden = true), tone === "bad" ? 30_000 : 6000);
}

// ---- begin

const ASLEEP = "This root sleeps. To look inside opens its files and starts none of its agents.";
const LINKS = { open: "live", waiting: "connecting …", refused: "no events" };
for (const [tab, { title }] of Object.entries(TABS)) {
  const link = el("a", { role: "tab", id: `tab-${tab}`, textContent: title, "aria-controls": "panel" });
  link.dataset.tab = tab;
  byId("tabs").append(link);
}
byId("tabs").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
  if (!step) return;
  event.preventDefault();
  const links = [...byId("tabs").children];
  const at = links.findIndex((link) => link.dataset.tab === state.tab) + step;
  const next = links[Math.min(links.length - 1, Math.max(0, at))];
  next.focus();
  location.hash = next.hash;
});
byId("find").addEventListener("input", () => {
  state.find = byId("find").value.trim();
  state.more = [];
  refresh();
});
byId("look-inside").onclick = () => {
  state.opened = state.root;
  refresh();
};
byId("next").onclick = () => {
  state.after = byId("next").dataset.after;
  refresh();
};
byId("first").onclick = () => {
  state.after = null;
  refresh();
};
byId("more-roots").onclick = async () => {
  await readRoots(byId("more-roots").dataset.after);
  showRoots();
};
window.addEventListener("hashchange", choose);
follow({
  event(told) {
    events.push({ ...told, n: (eventCount += 1) });
    if (events.length > EVENTS_SHOWN) events.shift();
    if (state.busy) state.again = true;
    else {
      clearTimeout(timer);
      timer = setTimeout(lookAgain, SOON_MS);
    }
  },
  lost(count) {
    lost += count;
  },
  link(kind) {
    byId("link").dataset.kind = kind;
    setText(byId("link-text"), LINKS[kind]);
  },
});
choose();
