// The page's small pure parts: addresses, text, passages, pauses between attempts.
import assert from "node:assert/strict";
import { test } from "node:test";

import { aboutOf } from "../../web/culet/web/demo/static/asks.js";
import { readable, runsFor, segmentsOf } from "../../web/culet/web/demo/static/message.js";
import { titleOf } from "../../web/culet/web/demo/static/panel.js";
import { passagesIn, passagesOf } from "../../web/culet/web/demo/static/passage.js";
import { assistantPath, pageOf, readPlace } from "../../web/culet/web/demo/static/route.js";
import { kebab } from "../../web/js/src/address.js";
import { blocksOf, spansOf } from "../../web/culet/web/demo/static/text.js";

test("a place survives its page address, whatever its names hold", () => {
  const places = [
    { chat: "default", sub: [] },
    { chat: "a b&c=ü", sub: [{ agent: "Researcher", name: "r/1%2F ?#" }] },
    { chat: "x", sub: [{ agent: "A", name: "b" }, { agent: "C", name: "d" }] },
    { agent: "Chief&x", chat: "y", sub: [] },
  ];

  for (const place of places) {
    assert.deepEqual(readPlace(new URL(pageOf(place), "http://x").search), place);
  }
  assert.equal(pageOf(places[2]), "/?chat=x&sub=A/b/C/d");
  assert.deepEqual(readPlace("?sub=Half"), { chat: "default", sub: [] });
  assert.deepEqual(readPlace("?chat=100%25&sub=A/%25zz").sub, [{ agent: "A", name: "%zz" }]);
});

test("an agent's path has each name encoded once", () => {
  const place = { chat: "a b", sub: [{ agent: "DeepResearcher", name: "r/1" }] };

  assert.equal(assistantPath(place), "/agents/assistant/a%20b/sub/deep-researcher/r%2F1");
  assert.equal(assistantPath({ agent: "Chief", chat: "x", sub: [] }), "/agents/chief/x");
});

test("a question to a person is told in one line", () => {
  assert.equal(aboutOf({ input: { question: "pay 5?" } }), "pay 5?");
  assert.equal(aboutOf({ input: { n: 5 } }), '{"n":5}');
  assert.equal(aboutOf({ inputShape: { n: "int" } }), '{"n":"int"}');
  for (const none of [{}, { input: {} }]) assert.equal(aboutOf(none), "");
  assert.equal(aboutOf({ input: "x".repeat(9_000) }).length, 300);
});

test("class names become kebab as the published clients do it", () => {
  const names = { MyAgent: "my-agent", AIChat: "a-i-chat", MY_AGENT: "my-agent", chat: "chat", Trail_: "trail" };

  for (const [name, expected] of Object.entries(names)) assert.equal(kebab(name), expected);
});

test("text falls into blocks, and an open fence takes the rest", () => {
  const kinds = (text) => blocksOf(text).map(({ kind, lines }) => [kind, ...lines]);

  assert.deepEqual(kinds("one\ntwo\n\n> a\n>   b\nthree"), [
    ["paragraph", "one", "two"],
    ["quote", "a", "  b"],
    ["paragraph", "three"],
  ]);
  assert.deepEqual(kinds("- a\n  b\n- c\n1. d"), [["bullets", "a b", "c"], ["numbers", "d"]]);
  assert.deepEqual(kinds("```py\n> x\n\ny"), [["code", "> x", "", "y"]]);
  assert.deepEqual(kinds(""), []);
});

test("places in files are found, and nothing else is taken for one", () => {
  const cites = (line) => spansOf(line).filter(({ kind }) => kind === "citation").map(({ text }) => text);

  assert.deepEqual(cites("see [stdlib/queue.py:28], trio/_channel.py:12-14. `a/b.md:3`"), [
    "stdlib/queue.py:28",
    "trio/_channel.py:12-14",
    "a/b.md:3",
  ]);
  assert.deepEqual(cites("docs/Makefile:12"), ["docs/Makefile:12"]);
  assert.deepEqual(cites("at 10:30, queue.Queue: x, http://h:80"), []);
  assert.equal(spansOf("a **b** `c` d").map(({ text }) => text).join("|"), "a |b| |c| d");
});

test("a wall of text is read in no time", () => {
  const wall = "a.b/".repeat(20_000);
  const before = performance.now();

  spansOf(wall);

  assert.ok(performance.now() - before < 1_000);
});

test("passages are found in any of the shapes that tools use", () => {
  const passage = { file: "a.py", line: 3, quote: "x = 1\n" };

  assert.deepEqual(passagesIn({ passages: [passage] }), [passage]);
  assert.deepEqual(passagesIn(JSON.stringify([passage])), [passage]);
  assert.deepEqual(passagesIn({ results: [{ path: "a.py", text: "t" }] }), [
    { file: "a.py", line: null, quote: "t" },
  ]);
  for (const odd of [null, 1, "no", {}, [null, 1, {}], { passages: 7 }]) {
    assert.deepEqual(passagesIn(odd), []);
  }
  const parts = [{ output: [passage] }, { type: "text" }, { output: [passage] }];
  assert.equal(passagesOf(parts).length, 1);
});

test("tool calls of one step stand together, text divides them", () => {
  const tool = (toolCallId) => ({ type: "tool-research", toolCallId });
  const parts = [{ type: "text", text: "plan" }, tool("a"), { type: "step-start" }, tool("b"),
    { type: "text", text: "" }, { type: "text", text: "so" }, tool("c")];

  const kinds = segmentsOf(parts).map((segment) => segment.parts?.map((part) => part.toolCallId) ?? segment.text);

  assert.deepEqual(kinds, ["plan", ["a", "b"], "so", ["c"]]);
});

test("a question that came as JSON is read as its question, anything else as it is", () => {
  assert.equal(readable('{"terms":["a"],"question":"why?"}'), "why?");
  for (const text of ["why?", "{not json", "{}", '{"n":1}']) assert.equal(readable(text), text);
});

test("siblings stand by order, then by the place of their call, then by run id", () => {
  const run = (runId, order) => ({ runId, order });
  const runs = { runsByToolCallId: { a: [run("z", 0), run("y", 1)], b: [run("b", 0), run("c", 0)] } };
  const parts = [{ toolCallId: "a", input: { question: "why" } }, { toolCallId: "b" }];

  const found = runsFor(runs, parts);

  assert.deepEqual(found.map((one) => one.run.runId), ["z", "b", "c", "y"]);
  assert.equal(found[0].title, "why");
  assert.equal(titleOf({ n: 1, other: "text" }), "text");
});
