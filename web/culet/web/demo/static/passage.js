// Passages: what a search brought, wherever it stands in a tool's output, and how it is shown.

import { el } from "./dom.js";
import { citation } from "./text.js";

const LISTS = ["passages", "results", "hits", "matches", "citations"];
const FILES = ["file", "path"];
const QUOTES = ["quote", "text", "snippet", "content"];

const firstOf = (item, names, type) =>
  names.map((name) => item[name]).find((value) => typeof value === type);

/** The passages in a tool's output as `{file, line, quote}`; [] when it holds none. */
export function passagesIn(output) {
  let value = output;
  if (typeof value === "string") {
    try {
      value = JSON.parse(value);
    } catch {
      return [];
    }
  }
  if (value === null || typeof value !== "object") return [];
  const list = Array.isArray(value) ? value : LISTS.map((name) => value[name]).find(Array.isArray);
  return (list ?? []).filter((item) => item !== null && typeof item === "object").flatMap((item) => {
    const file = firstOf(item, FILES, "string");
    const quote = firstOf(item, QUOTES, "string");
    if (file === undefined || quote === undefined) return [];
    return [{ file, line: Number.isInteger(item.line) ? item.line : null, quote }];
  });
}

/** All passages that a list of parts holds, each place once, in order of arrival. */
export function passagesOf(parts) {
  const found = new Map();
  for (const part of parts) {
    if (part.output === undefined) continue;
    for (const passage of passagesIn(part.output)) {
      const key = `${passage.file}:${passage.line}`;
      if (!found.has(key)) found.set(key, passage);
    }
  }
  return [...found.values()];
}

export function passageNode({ file, line, quote }) {
  return el(
    "figure",
    { className: "passage" },
    el("figcaption", {}, citation(line === null ? file : `${file}:${line}`)),
    el("blockquote", {}, quote.replace(/\n+$/, "")),
  );
}
