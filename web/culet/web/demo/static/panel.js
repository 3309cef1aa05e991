// One panel per run: what was asked, how it stands, what was found.

import { atEnd, el, place, setAttribute, setText } from "./dom.js";
import { passageNode, passagesOf } from "./passage.js";
import { TextView } from "./text.js";

const WORDS = {
  __proto__: null, // what comes over the wire may have any name
  running: "running",
  completed: "completed",
  error: "error",
  aborted: "aborted",
  interrupted: "interrupted",
};

/** A short title out of a tool's input: its question, or its first text. */
export function titleOf(input) {
  if (typeof input === "string") return input;
  if (input === null || typeof input !== "object") return "";
  const named = ["question", "query", "prompt", "task", "title"].map((name) => input[name]);
  const texts = [...named, ...Object.values(input)];
  return texts.find((text) => typeof text === "string" && text.trim() !== "") ?? "";
}

/** The text that a run has said so far. */
export function saidBy(parts) {
  const texts = parts.filter((part) => part.type === "text").map((part) => part.text.trim());
  return texts.filter((text) => text !== "").join("\n\n");
}

/** Reasons that are codes on the wire, in words. */
const REASONS = new Map([
  ["asker-ended", "stopped together with the answer that asked for it"],
  ["budget-exceeded", "its time was up"],
  ["deleted", "it was deleted"],
]);

function troubleOf(run) {
  const error = typeof run.error === "object" ? run.error?.message : run.error;
  const said = new Set([error, run.reason].filter(Boolean));
  return [...said].map((reason) => REASONS.get(reason) ?? reason).join(" · ");
}

const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

let made = 0;

export class RunPanel {
  #open = null; // null: as the status says
  #run = null;
  #facts = null;
  #shown = 0;
  #said = new TextView();
  #summary = new TextView();
  #title = el("span", { className: "panel-title" });
  #kind = el("span", { className: "panel-kind" });
  #badge = el("span", { className: "badge" });
  #bar = el("progress", { max: 1, "aria-label": "progress" });
  #phase = el("p", { className: "phase" });
  #trouble = el("p", { className: "trouble" });
  #passages = el("div", { className: "passages" });
  #body = el("div", { className: "panel-body", tabIndex: 0, role: "region" });
  #count = el("span", { className: "panel-count" });
  #drill = el("a", { className: "drill" }, "Open run", el("span", { "aria-hidden": "true" }, " →"));
  #toggle;

  constructor() {
    made += 1;
    const id = `panel-${made}`;
    this.#body.id = id;
    this.#toggle = el(
      "button",
      { type: "button", className: "panel-toggle", "aria-controls": id },
      el("span", { className: "chevron", "aria-hidden": "true" }),
      el("span", { className: "panel-name" }, this.#kind, this.#title),
    );
    this.#toggle.addEventListener("click", () => this.#flip());
    this.#body.append(this.#passages, this.#said.node);
    this.node = el(
      "article",
      { className: "panel" },
      el("header", { className: "panel-head" }, this.#toggle, this.#badge),
      this.#bar,
      this.#phase,
      this.#trouble,
      this.#summary.node,
      this.#body,
      el("footer", { className: "panel-foot" }, this.#count, this.#drill),
    );
    this.#summary.node.classList.add("panel-summary");
  }

  /** `facts`: `{title, href}`, what the panel's surroundings know about the run. */
  update(run, facts) {
    const same = this.#facts?.title === facts.title && this.#facts?.href === facts.href;
    if (run === this.#run && same) return;
    [this.#run, this.#facts] = [run, facts];
    this.#head(run, facts);
    this.#found(run);
    this.#fold();
  }

  #flip() {
    this.#open = !this.#isOpen;
    this.#fold();
  }

  get #isOpen() {
    return this.#open ?? this.#run.status === "running";
  }

  #head(run, { title, href }) {
    const kind = run.display?.name ?? run.agentType;
    setText(this.#kind, title ? kind : "");
    setText(this.#title, title || kind);
    setText(this.#badge, WORDS[run.status] ?? run.status);
    setAttribute(this.node, "data-status", run.status);
    setAttribute(this.node, "data-run", run.runId);
    setAttribute(this.node, "aria-label", `${title || kind}: ${run.status}`);
    setAttribute(this.#body, "aria-label", `what this run found: ${title || kind}`);
    setAttribute(this.#drill, "href", href);
    setAttribute(this.#drill, "aria-label", `Open run: ${title || kind}`);
    this.#progress(run);
    const trouble = run.status === "running" || run.status === "completed" ? "" : troubleOf(run);
    setText(this.#trouble, trouble);
    this.#trouble.hidden = trouble === "";
  }

  #progress(run) {
    const { fraction, phase, message } = run.progress ?? {};
    const running = run.status === "running";
    this.#bar.hidden = !running;
    if (running && fraction === undefined) this.#bar.removeAttribute("value");
    else this.#bar.value = Math.min(1, Math.max(0, fraction ?? 1));
    const text = [phase, message].filter(Boolean).join(" · ");
    setText(this.#phase, text || "starting");
    this.#phase.hidden = !running;
  }

  #found(run) {
    const follow = run.status === "running" && atEnd(this.#body);
    const passages = passagesOf(run.parts);
    if (passages.length < this.#shown) this.#passages.replaceChildren();
    this.#passages.append(...passages.slice(this.#passages.children.length).map(passageNode));
    this.#shown = passages.length;
    setText(this.#count, passages.length > 0 ? plural(passages.length, "passage") : "");
    const said = saidBy(run.parts);
    const summary = run.status === "completed" ? (run.summary ?? "").trim() : "";
    this.#summary.update(summary);
    this.#summary.node.hidden = summary === "";
    this.#said.update(said === summary ? "" : said);
    if (follow) this.#body.scrollTop = this.#body.scrollHeight;
  }

  #fold() {
    const open = this.#isOpen;
    setAttribute(this.#toggle, "aria-expanded", String(open));
    this.node.classList.toggle("is-open", open);
    this.#body.hidden = !open || (this.#shown === 0 && !this.#said.node.hasChildNodes());
  }
}

/** The panels of one step of an answer, side by side. */
export class PanelGrid {
  node = el("div", { className: "panels" });
  #panels = new Map();

  /** `runs`: `{run, title, href}` in the order in which they are shown. */
  update(runs) {
    for (const { run, title, href } of runs) {
      if (!this.#panels.has(run.runId)) this.#panels.set(run.runId, new RunPanel());
      this.#panels.get(run.runId).update(run, { title, href });
    }
    place(this.node, runs.map(({ run }) => this.#panels.get(run.runId).node));
  }
}
