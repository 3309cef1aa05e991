// Beyond the kept vectors: random chunks into the page's fold and into the published one.
import assert from "node:assert/strict";
import { test } from "node:test";
import { applyChunkToParts as published } from "agents/chat";

import { applyChunkToParts } from "../../web/js/src/reducer.js";

const TOOLS = ["input-start", "input-delta", "input-available", "input-error", "output-available",
  "output-error", "output-denied", "approval-request"].map((name) => `tool-${name}`);
const OTHERS = ["text-start", "text-delta", "text-end", "reasoning-delta", "reasoning-end",
  "data-x", "start-step", "glow"];
const INPUTS = [{ q: 1 }, [1], '{"z":2}', null, "x"];

/** The same numbers for the same seed, so that a failure can be seen again. */
function dice(seed) {
  let state = seed;
  return (list) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return list[Math.floor((state / 2 ** 32) * list.length)];
  };
}

function chunk(pick) {
  const made = { type: pick([...TOOLS, ...OTHERS]) };
  const maybe = (member) => Object.assign(made, pick([{}, {}, {}, {}, member]));
  if (!TOOLS.includes(made.type)) {
    Object.assign(made, { id: pick(["x", "y"]), delta: "a", data: pick([1, 2]) });
    return maybe({ providerMetadata: { p: { k: pick([1, 2]) } } });
  }
  Object.assign(made, { toolCallId: pick(["c1", "c2"]), toolName: "find" });
  if (/input-(available|error)/.test(made.type)) made.input = pick(INPUTS);
  if (made.type === "tool-output-available") made.output = pick([1, { a: 2 }]);
  if (made.type.endsWith("error")) made.errorText = "bad";
  if (made.type === "tool-input-delta") made.inputTextDelta = pick(['{"a":', "1}", '{"k":3}']);
  if (made.type === "tool-approval-request") made.approvalId = "ap";
  maybe({ title: "T" });
  return maybe({ preliminary: true });
}

test("3000 random streams become the same parts as in the published package", () => {
  for (let seed = 1; seed <= 3000; seed += 1) {
    const pick = dice(seed);
    const chunks = Array.from({ length: 10 }, () => chunk(pick));
    const expected = [];
    for (const one of structuredClone(chunks)) published(expected, one);

    const got = chunks.reduce(applyChunkToParts, []);

    const plain = (value) => JSON.parse(JSON.stringify(value));
    assert.deepEqual(plain(got), plain(expected), `seed ${seed}: ${JSON.stringify(chunks)}`);
  }
});
