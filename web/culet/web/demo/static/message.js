// One message: what was said, with the tools and runs where they were called.

import { el, place, setAttribute, setText } from "./dom.js";
import { PanelGrid, titleOf } from "./panel.js";
import { passageNode, passagesIn } from "./passage.js";
import { runsOf, siblingOrder } from "./culet/reducer.js";
import { TextView } from "./text.js";

const NOTES = {
  __proto__: null, // what comes over the wire may have any name
  error: "The answer ended with an error",
  stopped: "Stopped",
  skipped: "Not answered: it was put aside",
};

const isTool = (part) => typeof part.toolCallId === "string";

/** What a run was asked is often JSON: its question is what people want to read. */
export function readable(text) {
  if (!text.trimStart().startsWith("{")) return text;
  try {
    return titleOf(JSON.parse(text)) || text;
  } catch {
    return text;
  }
}

/**
 * A message's parts as runs of `{kind: "text", text}` and `{kind: "tools", parts}`, in order.
 * Tool calls that only a step border divides belong together.
 */
export function segmentsOf(parts) {
  const segments = [];
  for (const part of parts) {
    const last = segments.at(-1);
    if (isTool(part)) {
      if (last?.kind === "tools") last.parts.push(part);
      else segments.push({ kind: "tools", parts: [part] });
    } else if (part.type === "text" && part.text !== "") {
      if (last?.kind === "text") last.text += `\n\n${part.text}`;
      else segments.push({ kind: "text", text: part.text });
    } else if (part.type === "file" || part.type?.startsWith("source-")) {
      segments.push({ kind: "text", text: part.title ?? part.filename ?? part.url ?? "" });
    }
  }
  return segments;
}

/** The runs that tool calls dispatched: by order, then by place of the call, then by run id. */
export function runsFor(runs, parts) {
  const found = parts.flatMap((part, at) =>
    runsOf(runs, part.toolCallId).map((run) => ({ run, at, title: titleOf(part.input) })),
  );
  return found.sort((a, b) => a.run.order - b.run.order || a.at - b.at || siblingOrder(a.run, b.run));
}

const TOOL_WORDS = {
  __proto__: null,
  "input-streaming": "preparing",
  "input-available": "working",
  "approval-requested": "waiting for approval",
  "approval-responded": "approved",
  "output-available": "done",
  "output-error": "error",
  "output-denied": "denied",
};

/** A tool call without a run of its own: a line, and the passages that it brought. */
class ToolView {
  node = el("div", { className: "tool" });
  #part = null;
  #name = el("span", { className: "tool-name" });
  #title = el("span", { className: "tool-title" });
  #state = el("span", { className: "tool-state" });
  #error = el("p", { className: "trouble" });
  #passages = el("div", { className: "passages" });

  constructor() {
    const line = el("p", { className: "tool-line" }, this.#name, this.#title, this.#state);
    this.node.append(line, this.#error, this.#passages);
  }

  update(part) {
    if (part === this.#part) return;
    this.#part = part;
    setText(this.#name, part.toolName ?? part.type.replace(/^tool-/, ""));
    setText(this.#title, titleOf(part.input));
    setText(this.#state, TOOL_WORDS[part.state] ?? part.state);
    setAttribute(this.node, "data-state", part.state);
    setText(this.#error, part.errorText ?? "");
    this.#error.hidden = !part.errorText;
    const passages = part.state === "output-available" ? passagesIn(part.output) : [];
    place(this.#passages, passages.map(passageNode));
  }
}

class ToolsView {
  node = el("div", { className: "tools" });
  #lines = el("div", { className: "tool-lines" });
  #grid = new PanelGrid();
  #tools = new Map();

  constructor() {
    this.node.append(this.#lines, this.#grid.node);
  }

  update({ parts }, { runs, hrefOf }) {
    this.#grid.update(runsFor(runs, parts).map((found) => ({ ...found, href: hrefOf(found.run) })));
    const plain = parts.filter((part) => runsOf(runs, part.toolCallId).length === 0);
    for (const part of plain) {
      if (!this.#tools.has(part.toolCallId)) this.#tools.set(part.toolCallId, new ToolView());
      this.#tools.get(part.toolCallId).update(part);
    }
    place(this.#lines, plain.map((part) => this.#tools.get(part.toolCallId).node));
  }
}

class SegmentText extends TextView {
  update(segment) {
    super.update(segment.text);
  }
}

export class MessageView {
  #segments = [];
  #shown = null;
  #body = el("div", { className: "message-body" });
  #note = el("p", { className: "note" });
  #busy = el("p", { className: "busy" });

  constructor(role) {
    const who = role === "user" ? "You" : "Assistant";
    this.node = el(
      "article",
      { className: `message from-${role}`, "aria-label": who },
      this.#body,
      this.#busy,
      this.#note,
    );
  }

  /** `context`: `{runs, hrefOf, note, busy}`; busy is a word while the turn goes on, or "". */
  update(message, context) {
    const { runs, note, busy } = context;
    const old = this.#shown;
    if (old?.message === message && old.runs === runs && old.note === note && old.busy === busy) return;
    if (old?.message !== message || old.runs !== runs) this.#content(message, context);
    this.#shown = { message, runs, note, busy };
    setText(this.#busy, busy);
    this.#busy.hidden = busy === "";
    setText(this.#note, note ? [NOTES[note.kind], note.text].filter(Boolean).join(": ") : "");
    this.#note.hidden = !note;
    setAttribute(this.#note, "data-kind", note?.kind ?? "");
  }

  #content(message, context) {
    const segments = segmentsOf(message.parts).map((segment) =>
      message.role === "user" && segment.kind === "text"
        ? { ...segment, text: readable(segment.text) }
        : segment,
    );
    segments.forEach((segment, at) => {
      if (this.#segments[at]?.kind !== segment.kind) {
        const view = segment.kind === "text" ? new SegmentText() : new ToolsView();
        this.#segments[at] = { kind: segment.kind, view };
      }
      this.#segments[at].view.update(segment, context);
    });
    this.#segments.length = segments.length;
    place(this.#body, this.#segments.map(({ view }) => view.node));
  }
}
