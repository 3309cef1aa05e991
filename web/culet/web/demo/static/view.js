// The page: takes what is true now and makes the document say so. Nothing is rebuilt that did
// not change, and however many frames arrive, the document is touched once per animation frame.

import { activeTurn } from "./culet/chat.js";
import { AsksView } from "./asks.js";
import { atEnd, el, Keyed, place, setAttribute, setText } from "./dom.js";
import { MessageView } from "./message.js";
import { PanelGrid } from "./panel.js";
import { pageOf } from "./route.js";

const EXAMPLES = [
  "How does asyncio.Queue differ from queue.Queue, and what does trio use instead?",
  "What happens to the siblings when a task in a trio nursery raises?",
  "How does contextlib.ExitStack unwind when a callback itself raises?",
  "When should I use functools.lru_cache instead of functools.cached_property?",
];

const find = (id) => document.getElementById(id);
const wait = (ms) => (ms < 1500 ? "now" : `in ${Math.round(ms / 1000)} s`);

const LINKS = {
  connecting: ({ tries }) => (tries === 0 ? "connecting …" : "reconnecting …"),
  open: () => "connected",
  waiting: ({ ms }) => `connection lost, reconnecting ${wait(ms)} …`,
  refused: ({ code, reason }) => (code === 4410 ? "this chat was deleted" : `refused: ${reason || code}`),
};

export class View {
  #place;
  #ask;
  #messages;
  #loose = new PanelGrid();
  #asks;
  #planned = false;
  #model = null;
  #told = { phase: null, link: null, ended: new Set() };
  #stick = true;

  /** `actions`: `ask(text)`, `answer(call, approved)`, `stop()`, `clear()`, `retry()`. */
  constructor(place, actions) {
    this.#place = place;
    this.#ask = actions.ask;
    this.#messages = new Keyed((key) => new MessageView(key.slice(0, key.indexOf(":"))));
    this.#asks = new AsksView(actions.answer);
    this.#frame();
    this.#compose();
    find("stop").addEventListener("click", actions.stop);
    find("retry").addEventListener("click", actions.retry);
    this.#confirm(actions.clear);
    const scroll = find("scroll");
    scroll.addEventListener("scroll", () => {
      this.#stick = atEnd(scroll);
      find("latest").hidden = this.#stick;
    }, { passive: true });
    find("latest").addEventListener("click", () => this.#toEnd());
    new ResizeObserver(() => this.#stick && this.#toEnd()).observe(find("log"));
  }

  /** Shows `model` at the next animation frame; the last one of a frame wins. */
  show(model) {
    this.#model = model;
    if (this.#planned) return;
    this.#planned = true;
    const draw = () => {
      this.#planned = false;
      this.#draw(this.#model);
    };
    // A hidden tab has no animation frames, but its messages still arrive.
    if (document.hidden) setTimeout(draw, 250);
    else requestAnimationFrame(draw);
  }

  // ------------------------------------------------------------------ what never changes

  #frame() {
    const { chat, sub } = this.#place;
    find("bottom").prepend(this.#asks.node);
    const here = sub.at(-1);
    document.title = here ? `${here.agent} · Culet` : chat === "default" ? "Culet" : `${chat} · Culet`;
    setAttribute(find("brand"), "href", pageOf({ ...this.#place, sub: [] }));
    const where = find("where");
    if (!here) {
      where.append(chat === "default" ? "" : chat);
      return;
    }
    const back = pageOf({ ...this.#place, sub: sub.slice(0, -1) });
    const label = sub.length > 1 ? sub.at(-2).agent : "the chat";
    where.append(
      el("a", { className: "back", href: back }, el("span", { "aria-hidden": "true" }, "← "), `Back to ${label}`),
      el("span", { className: "crumb", title: here.name }, `${here.agent} · ${here.name}`),
    );
    document.body.classList.add("is-child");
    find("bottom").classList.add("is-read-only");
    find("composer").hidden = true;
    find("clear").hidden = true;
    setText(find("hint"), "You are looking at a run. It can be read here, not talked to.");
    setText(find("empty-title"), "Nothing said yet");
    setText(find("empty-text"), "This run has no messages so far; they appear here as they come.");
    find("examples").hidden = true;
  }

  #compose() {
    const box = find("question");
    const grow = () => {
      box.rows = 1;
      while (box.rows < 8 && box.scrollHeight > box.clientHeight + 2) box.rows += 1;
    };
    const submit = (event) => {
      event.preventDefault();
      const text = box.value.trim();
      if (text === "") return box.focus();
      box.value = "";
      grow();
      this.#stick = true;
      return this.#ask(text);
    };
    box.addEventListener("input", grow);
    box.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
    });
    find("composer").addEventListener("submit", submit);
    find("examples").append(
      ...EXAMPLES.map((text) => {
        const chip = el("button", { type: "button", className: "example" }, text);
        chip.addEventListener("click", () => this.#ask(text));
        return el("li", {}, chip);
      }),
    );
    if (matchMedia("(hover: hover)").matches) box.focus();
  }

  #confirm(clear) {
    const dialog = find("confirm");
    find("clear").addEventListener("click", () => dialog.showModal());
    find("confirm-no").addEventListener("click", () => dialog.close());
    find("confirm-yes").addEventListener("click", () => {
      dialog.close();
      clear();
      find("question").focus();
    });
  }

  #toEnd() {
    this.#stick = true;
    find("latest").hidden = true;
    find("scroll").scrollTop = find("scroll").scrollHeight;
  }

  // ---------------------------------------------------------------------- what is drawn

  #draw(model) {
    const { chat, runs } = model;
    const turn = activeTurn(chat);
    this.#link(model.link);
    this.#library(model.library);
    this.#log(model, turn);
    const empty = model.loaded && chat.messages.length === 0 && !turn;
    find("empty").hidden = !empty;
    const waiting = this.#waiting(model, turn);
    setText(find("waiting"), waiting);
    find("waiting").hidden = waiting === "";
    this.#asks.update(model.waitingCalls);
    this.#buttons(chat, turn);
    this.#announce(turn, runs);
    if (this.#stick) this.#toEnd();
  }

  #log({ chat, runs }, turn) {
    const hrefOf = (run) => {
      const { agent, name } = run.subAgent;
      return pageOf({ ...this.#place, sub: [...this.#place.sub, { agent, name }] });
    };
    const keys = chat.messages.map((message) => `${message.role}:${message.id}`);
    const views = this.#messages.take(keys);
    chat.messages.forEach((message, at) => {
      const live = turn?.messageId === message.id;
      const busy = live && turn.phase === "stopping" ? "stopping …" : live ? this.#doing(message, runs) : "";
      views[at].update(message, { runs, hrefOf, note: chat.notes.get(message.id), busy });
    });
    const nodes = views.map((view) => view.node);
    if (runs.unboundRuns.length > 0) {
      this.#loose.update(runs.unboundRuns.map((run) => ({ run, title: "", href: hrefOf(run) })));
      nodes.push(this.#loose.node);
    }
    place(find("log"), nodes);
  }

  #doing(message, runs) {
    const calls = message.parts.filter((part) => typeof part.toolCallId === "string");
    const own = calls.flatMap((part) => runs.runsByToolCallId[part.toolCallId] ?? []);
    const running = own.filter((run) => run.status === "running").length;
    if (running > 0) return `researching: ${own.length - running} of ${own.length} done`;
    const last = message.parts.at(-1);
    return last?.type === "text" && last.text !== "" ? "writing …" : "thinking …";
  }

  #waiting({ chat, link, library }, turn) {
    if (!turn || (turn.messageId !== null && turn.phase !== "asked")) return "";
    if (chat.unsent.some(({ id }) => id === turn.id) && link.kind !== "open") {
      return "Your question is sent when the connection is back.";
    }
    if (turn.phase === "stopping") return "stopping …";
    if (library?.phase === "indexing") return "Your question waits for the library to be indexed.";
    return "thinking …";
  }

  #buttons(chat, turn) {
    const stop = find("stop");
    stop.hidden = !turn || this.#place.sub.length > 0;
    stop.disabled = turn?.phase === "stopping";
    setText(stop, turn?.phase === "stopping" ? "Stopping …" : "Stop");
    find("clear").disabled = chat.messages.length === 0;
    setAttribute(find("log"), "aria-busy", String(Boolean(turn)));
  }

  #link(link) {
    setText(find("link-text"), LINKS[link.kind](link));
    setAttribute(find("link"), "data-kind", link.kind);
    find("retry").hidden = link.kind !== "waiting" || link.ms < 1500;
  }

  #library(library) {
    const box = find("library");
    const indexing = library?.phase === "indexing";
    box.hidden = !indexing;
    if (!indexing) return;
    const { done = 0, total = 0, passages = 0 } = library;
    const bar = find("library-bar");
    if (total > 0) bar.value = done / total;
    else bar.removeAttribute("value");
    const number = (count) => count.toLocaleString("en");
    const part = total > 0 ? `${number(done)} of ${number(total)} files` : "looking for files";
    setText(find("library-text"), `Indexing the library: ${part}, ${number(passages)} passages`);
  }

  /** Screen readers hear of beginnings and ends, not of every chunk. */
  #announce(turn, runs) {
    const told = this.#told;
    const phase = turn ? "busy" : "idle";
    const words = [];
    if (told.phase !== null && told.phase !== phase) words.push(turn ? "Answering." : "The answer has ended.");
    told.phase = phase;
    for (const run of Object.values(runs.runsById)) {
      if (run.status === "running" || told.ended.has(run.runId)) continue;
      told.ended.add(run.runId);
      if (turn) words.push(`A run ended: ${run.status}.`);
    }
    if (words.length > 0) setText(find("announcer"), words.join(" "));
  }
}
