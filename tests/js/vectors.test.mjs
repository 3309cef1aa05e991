// The page's reducer gives what the published package gives, except where ours is meant to differ.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import {
  applyAgentToolEvent,
  applyAgentToolEvents,
  applyChunkToParts,
  callsOfRuns,
  emptyState,
  isPartChunk,
} from "../../web/js/src/reducer.js";

const vectors = (name) =>
  JSON.parse(readFileSync(new URL(`../vectors/${name}.json`, import.meta.url), "utf8")).cases;
const plain = (value) => JSON.parse(JSON.stringify(value));
const view = ({ runsById, runsByToolCallId, unboundRuns }) =>
  plain({ runsById, runsByToolCallId, unboundRuns });
const fold = (frames, from = emptyState()) => frames.reduce(applyAgentToolEvent, from);

function deepFreeze(value) {
  if (value !== null && typeof value === "object" && !Object.isFrozen(value)) {
    Object.freeze(value);
    Object.values(value).forEach(deepFreeze);
  }
  return value;
}

const run = (status, members = {}) => ({
  runId: "r1",
  agentType: "Researcher",
  parentToolCallId: "call-1",
  order: 0,
  status,
  parts: [],
  subAgent: { agent: "Researcher", name: "r1" },
  ...members,
});
const bound = (only, call = "call-1") => ({
  runsById: { [only.runId]: only },
  runsByToolCallId: { [call]: [only] },
  unboundRuns: [],
});
const said = (text, state = "done") => ({ type: "text", text, state });

/** Where ours differs, and why. */
const OURS = {
  // the first terminal frame stays
  "RD-21": bound(run("completed", { summary: "ok" })),
  "RD-23": bound(
    run("interrupted", { error: "lost", reason: "not-tailable", childStillRunning: true }),
  ),
  // a chunk before `started` is not marked as seen, so the replay brings it
  "RD-29": bound(run("completed", { parts: [said("early", "streaming")], summary: "early" })),
  // ids that name inherited members are ordinary ids
  "RD-61": bound(
    run("completed", { parentToolCallId: "toString", parts: [said("Hello")], summary: "Hello" }),
    "toString",
  ),
};

for (const { id, title, frames, deduped } of vectors("reducer")) {
  test(`${id} ${title}`, () => {
    const got = view(fold(frames));

    const expected = OURS[id] ?? deduped.state;
    if (id === "RD-37") {
      // ties go by code points, not by the reader's locale
      const runs = expected.runsByToolCallId["call-1"];
      runs.sort((a, b) => (a.runId < b.runId ? -1 : 1));
    }
    if (id === "RD-25") {
      assert.equal(got.runsById.r1.status, "aborted");
      return;
    }
    assert.deepEqual(got, expected);
  });

  test(`${id} again, doubled and cut, gives the same picture and the same object`, () => {
    const once = deepFreeze(fold(frames.map(deepFreeze)));
    const ends = new Set(["finished", "error", "aborted", "interrupted"]);
    const disputed = frames.filter((frame) => ends.has(frame.event?.kind)).length > 1;
    const early = id === "RD-29" || id === "RD-39" || id === "RD-63";

    if (!disputed && !early) assert.equal(fold(frames, once), once);
    assert.deepEqual(view(fold(frames, once)).unboundRuns, view(once).unboundRuns);
    for (let cut = 0; cut <= frames.length; cut += 1) {
      const replayed = fold(frames, fold(frames.slice(0, cut)));
      if (!early) assert.deepEqual(view(replayed), view(once));
    }
  });
}

for (const { id, title, chunks, agents } of vectors("chunks")) {
  test(`${id} ${title}`, () => {
    const lists = [deepFreeze([])];
    for (const chunk of chunks) lists.push(deepFreeze(applyChunkToParts(lists.at(-1), chunk)));

    assert.deepEqual(plain(lists.at(-1)), agents.parts);
    assert.deepEqual(chunks.map(isPartChunk), agents.handled);
  });
}

test("progress is shown and makes no part, a milestone counts once", () => {
  const frame = (sequence, event) => ({
    type: "agent-tool-event",
    sequence,
    event: { runId: "__proto__", ...event },
  });
  const body = (type, data, more) => JSON.stringify({ type, data, ...more });
  const frames = [
    frame(0, { kind: "started", agentType: "Researcher", order: 0 }),
    frame(1, {
      kind: "chunk",
      body: body("data-agent-progress", { fraction: 0.5, phase: 7, message: "half" }),
    }),
    frame(2, { kind: "chunk", body: body("data-agent-milestone", { name: "m", sequence: 1, at: 5 }) }),
    frame(3, { kind: "chunk", body: body("data-agent-milestone", { name: "m", sequence: 1, at: 5 }) }),
  ];

  const half = fold(frames.slice(0, 2));
  const end = fold(frames);

  assert.deepEqual(plain(half.unboundRuns[0].progress), { fraction: 0.5, message: "half" });
  assert.deepEqual(half.unboundRuns[0].parts, []);
  assert.equal(end.unboundRuns[0].parts.length, 1);
  assert.equal(end.unboundRuns[0].milestones.length, 1);
  assert.deepEqual(Object.keys(end.runsById), ["__proto__"]);
});

test("a chunk that found nothing to change does not change it when it comes again", () => {
  const frame = (sequence, event) => ({
    type: "agent-tool-event",
    sequence,
    event: { runId: "r", agentType: "A", order: 0, ...event },
  });
  const bodies = [{ type: "text-end", id: "t" }, { type: "text-start", id: "t" }];
  const frames = [
    frame(0, { kind: "started" }),
    ...bodies.map((body, at) => frame(at + 1, { kind: "chunk", body: JSON.stringify(body) })),
  ];

  const once = fold(frames);

  assert.equal(fold(frames, once), once);
  assert.equal(once.runsById.r.parts[0].state, "streaming");
});

test("a second, different end is counted and changes no run", () => {
  const frame = (sequence, kind) => ({
    type: "agent-tool-event",
    sequence,
    event: { kind, runId: "r", agentType: "A", order: 0, summary: "s", reason: "late" },
  });
  const done = fold([frame(0, "started"), frame(1, "finished")]);

  assert.equal(fold([frame(1, "finished")], done), done);
  const disputed = fold([frame(2, "aborted")], done);
  assert.equal(disputed.protocolErrors, 1);
  assert.equal(disputed.runsById, done.runsById);
});

test("malformed frames leave the very state they met", () => {
  const state = emptyState();
  const odd = [null, 1, "x", [], {}, { type: "agent-tool-event" }, { type: "agent-tool-event", event: 1 },
    { type: "agent-tool-event", event: { kind: "toString", runId: "r" } },
    { type: "agent-tool-event", event: { kind: "chunk", runId: "r", body: 5 } }];

  for (const frame of odd) assert.equal(applyAgentToolEvent(state, frame), state);
});

const event = (sequence, kind, runId = "r", more = {}) => ({
  type: "agent-tool-event",
  sequence,
  parentToolCallId: more.call,
  event: { kind, runId, agentType: "A", order: 0, ...more },
});
const word = (sequence, runId, text) =>
  event(sequence, "chunk", runId, { body: JSON.stringify({ type: "text-delta", id: "t", delta: text }) });

test("a run that was cleared is forgotten, and its id may begin anew", () => {
  const frames = [event(0, "started"), word(1, "r", "old"), event(2, "finished"), event(0, "started", "other")];
  const told = fold([...frames, event(3, "cleared", undefined, { runIds: ["r", "nobody", {}] })]);

  assert.deepEqual(Object.keys(told.runsById), ["other"]);
  assert.deepEqual(told.unboundRuns.map(({ runId }) => runId), ["other"]);
  const anew = fold([event(0, "started"), word(1, "r", "new")], told);
  assert.deepEqual(anew.runsById.r.parts[0].text, "new");
  assert.equal(fold([event(9, "cleared", undefined, { runIds: ["nobody"] })], anew), anew);
});

test("reports that share a number each count once", () => {
  const report = (id, message) =>
    event(1, "chunk", "r", { body: JSON.stringify({ type: "data-agent-progress", id, data: { message } }) });
  const told = fold([event(0, "started"), report("a", "one"), report("b", "two"), report("a", "one")]);

  assert.equal(told.runsById.r.progress.message, "two");
});

test("many frames at once give what they give one by one", () => {
  const frames = [];
  for (let run = 0; run < 5; run += 1) {
    frames.push(event(0, "started", `r${run}`, { call: run % 2 ? "c" : undefined, order: 5 - run }));
    for (let at = 1; at < 4; at += 1) frames.push(word(at, `r${run}`, `${at} `));
    if (run === 3) frames.push(event(9, "cleared", undefined, { runIds: ["r1"] }));
    frames.push(event(4, "finished", `r${run}`));
  }
  const state = fold(frames.slice(0, 3));

  assert.deepEqual(plain(applyAgentToolEvents(state, frames)), plain(fold(frames, state)));
  assert.equal(applyAgentToolEvents(state, frames.slice(0, 3)), state);
});

test("a thousand runs of fifty chunks are folded at once in a moment", () => {
  const frames = [];
  for (let run = 0; run < 1000; run += 1) {
    frames.push(event(0, "started", `r${run}`, { call: `c${run % 7}` }));
    for (let at = 1; at <= 50; at += 1) frames.push(word(at, `r${run}`, "w "));
    frames.push(event(51, "finished", `r${run}`));
  }
  const small = frames.slice(0, 5200);
  const once = (list) => {
    const begun = performance.now();
    applyAgentToolEvents(emptyState(), list);
    return performance.now() - begun;
  };
  const time = (list) => Math.min(once(list), once(list), once(list)); // others want the machine too
  time(small);

  assert.ok(time(frames) < 30 * time(small), "ten times as many take about ten times as long");
});

const report = (sequence, runId, phase, calls) =>
  event(sequence, "chunk", runId, {
    body: JSON.stringify({ type: "data-agent-progress", id: `p${sequence}`, data: { phase, data: { calls } } }),
  });
const call = (runId, toolCallId = "k1") => ({ runId, toolCallId, toolName: "pay", state: "approval-requested" });

test("what runs ask stands until they say answered, end or are cleared, whatever else they report", () => {
  const all = [event(0, "started", "a"), event(0, "started", "b"), report(1, "a", "waiting", [call("deep"), call("a")]),
    report(1, "b", "waiting", [call("deep"), call("b")]), report(2, "a", "writing", undefined)];
  const told = deepFreeze(fold(all.map(deepFreeze)));
  const asks = (state) => callsOfRuns(state).map(({ runId }) => runId);

  assert.deepEqual(asks(told), ["deep", "a", "b"], "each once");
  assert.equal(fold(all, told), told);
  assert.deepEqual(asks(fold([report(3, "a", "waiting", [call("a")])], told)), ["a", "deep", "b"]);
  const answered = fold([report(3, "a", "answered")], told);
  assert.deepEqual(asks(answered), ["deep", "b"]);
  assert.equal(fold(all, answered), answered, "an old report that comes again asks nothing again");
  for (const end of ["finished", "error", "aborted", "interrupted"]) {
    assert.deepEqual(asks(fold([event(9, end, "b")], answered)), []);
    assert.deepEqual(asks(fold([event(9, end, "b"), report(10, "b", "waiting", [call("b")])], answered)), []);
  }
  assert.deepEqual(asks(fold([event(9, "cleared", undefined, { runIds: ["a"] })], told)), ["deep", "b"]);
});

test("ids of any kind ask like others, and calls that are none are left out", () => {
  const odd = ["__proto__", "constructor", "toString", "hasOwnProperty"];
  const frames = odd.flatMap((id) => [event(0, "started", id), report(1, id, "waiting", [call(id, id), null, 7, {}, { runId: id }])]);
  const told = fold(frames);

  assert.deepEqual(callsOfRuns(told).map(({ runId, toolCallId }) => [runId, toolCallId]), odd.map((id) => [id, id]));
  assert.deepEqual(callsOfRuns(fold(odd.map((id) => event(2, "finished", id)), told)), []);
  for (const calls of [null, 7, "x", {}]) {
    assert.deepEqual(callsOfRuns(fold([event(0, "started"), report(1, "r", "waiting", calls)])), []);
  }
  const bare = event(1, "chunk", "r", { body: JSON.stringify({ type: "data-agent-progress", id: "p" }) });
  assert.deepEqual(callsOfRuns(fold([event(0, "started"), bare])), []);
});
