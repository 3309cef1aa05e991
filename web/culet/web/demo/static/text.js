// Text with a little structure: paragraphs, lists, quotes, fenced code, `code`, **strong** and
// citations such as `stdlib/queue.py:28`. `blocksOf` and `spansOf` are pure; `TextView` keeps
// the nodes of blocks that did not change while a text grows.

import { el } from "./dom.js";

// Bounded everywhere: a wall of text without a blank must not make the match go quadratic.
const DIRS = String.raw`(?:[\w.@+~-]{1,80}\/)`;
const LINE = String.raw`:\d{1,9}(?:[-–]\d{1,9})?`;
const CITATION = [
  String.raw`${DIRS}{0,12}[\w@+~-][\w.@+~-]{0,80}\.[A-Za-z]\w{0,15}${LINE}`,
  String.raw`${DIRS}{1,12}[\w.@+~-]{1,80}${LINE}`,
].join("|");
const SPANS = new RegExp(`\`([^\`\\n]+)\`|\\*\\*([^*\\n]+)\\*\\*|\\[(${CITATION})\\]|(${CITATION})`, "g");
const WHOLE_CITATION = new RegExp(`^(?:${CITATION})$`);

const STARTS = [
  ["quote", /^\s{0,3}>\s?/],
  ["bullets", /^\s{0,3}[-*•]\s+/],
  ["numbers", /^\s{0,3}\d{1,3}[.)]\s+/],
  ["heading", /^#{1,6}\s+/],
];

function kindOf(line) {
  if (line.trim() === "") return ["blank", line];
  const found = STARTS.find(([, start]) => start.test(line));
  return found ? [found[0], line.replace(found[1], "")] : ["paragraph", line];
}

/** A text as `{kind, lines}` blocks: paragraph, quote, bullets, numbers, heading, code. */
export function blocksOf(text) {
  const blocks = [];
  let open = null;
  let fence = null;
  for (const line of text.split("\n")) {
    const mark = /^\s{0,3}(`{3,}|~{3,})/.exec(line)?.[1];
    if (fence !== null) {
      if (mark?.startsWith(fence)) [open, fence] = [null, null];
      else open.lines.push(line);
      continue;
    }
    if (mark) {
      fence = mark;
      open = { kind: "code", lines: [] };
      blocks.push(open);
      continue;
    }
    const [kind, rest] = kindOf(line);
    const isItem = kind === "bullets" || kind === "numbers";
    if (kind === "blank") open = null;
    else if (kind === "paragraph" && open?.kind === "paragraph") open.lines.push(rest);
    else if (kind === "paragraph" && open && /^(bullets|numbers)$/.test(open.kind)) {
      open.lines.push(`${open.lines.pop()} ${rest.trim()}`);
    } else if (open?.kind === kind && (isItem || kind === "quote")) open.lines.push(rest);
    else {
      open = { kind, lines: [rest] };
      blocks.push(open);
    }
  }
  return blocks;
}

/** A line of text as `{kind, text}` spans: text, code, strong, citation. */
export function spansOf(line) {
  const spans = [];
  let from = 0;
  for (const match of line.matchAll(SPANS)) {
    if (match.index > from) spans.push({ kind: "text", text: line.slice(from, match.index) });
    const [whole, code, strong, bracketed, bare] = match;
    if (strong !== undefined) spans.push({ kind: "strong", text: strong });
    else if (code !== undefined && !WHOLE_CITATION.test(code)) spans.push({ kind: "code", text: code });
    else spans.push({ kind: "citation", text: code ?? bracketed ?? bare });
    from = match.index + whole.length;
  }
  if (from < line.length) spans.push({ kind: "text", text: line.slice(from) });
  return spans;
}

const LONG_CITATION = 44;

/** A place in a document, `file:line`, as a chip; only a long one may break, after slashes. */
export function citation(text) {
  if (text.length <= LONG_CITATION) return el("span", { className: "cite" }, text);
  const chip = el("span", { className: "cite is-long" });
  for (const piece of text.split(/(?<=\/)/)) chip.append(piece, el("wbr"));
  chip.lastElementChild.remove();
  return chip;
}

function spanNode({ kind, text }) {
  if (kind === "citation") return citation(text);
  if (kind === "code") return el("code", {}, text);
  return kind === "strong" ? el("strong", {}, text) : text;
}

const inline = (text) => spansOf(text).map(spanNode);
const items = (lines) => lines.map((line) => el("li", {}, ...inline(line)));

function blockNode({ kind, lines }) {
  switch (kind) {
    case "code":
      return el("pre", { tabIndex: 0 }, el("code", {}, lines.join("\n")));
    case "quote":
      return el("blockquote", {}, ...inline(lines.join("\n")));
    case "bullets":
      return el("ul", {}, ...items(lines));
    case "numbers":
      return el("ol", {}, ...items(lines));
    case "heading":
      return el("p", { className: "heading" }, ...inline(lines.join(" ")));
    default:
      return el("p", {}, ...inline(lines.join("\n")));
  }
}

export class TextView {
  node = el("div", { className: "text" });
  #keys = [];
  #text = null;

  /** Shows `text`; blocks that are the same as before keep their nodes. */
  update(text) {
    if (text === this.#text) return;
    this.#text = text;
    const blocks = blocksOf(text);
    const keys = blocks.map((block) => JSON.stringify(block));
    let same = 0;
    while (same < keys.length && keys[same] === this.#keys[same]) same += 1;
    while (this.node.children.length > same) this.node.lastElementChild.remove();
    this.node.append(...blocks.slice(same).map(blockNode));
    this.#keys = keys;
  }
}
