// How one row of each list looks. A view is `{node, update(item)}`; `now` is the server's clock.
import { bytes, clock, el, many, moment, setText, span } from "./dom.js";

/** A path below its root, which stands above the list already. */
const below = (path) => path.split("/").slice(2).join("/") || "the root itself";

/** A row: what it is called, how it stands, facts in small, what may be done to it. */
function row({ actions = [], timeline = false } = {}) {
  const name = el("span", { className: "name" });
  const badge = el("span", { className: "badge" });
  const facts = el("p", { className: "facts" });
  const bar = el("span", { className: "bar" });
  const track = timeline ? el("div", { className: "track", "aria-hidden": "true" }, bar) : null;
  const buttons = el("p", { className: "buttons" });
  const made = new Map();
  const node = el("li", { className: "row" },
    el("p", { className: "line" }, name, badge), facts, track, buttons);
  for (const { verb, text, run } of actions) {
    const button = el("button", { type: "button", className: "small", textContent: text });
    button.dataset.verb = verb;
    button.addEventListener("click", run);
    made.set(verb, button);
    buttons.append(button);
  }
  return {
    node, bar,
    set(title, state, tone, told) {
      setText(name, title);
      setText(badge, state);
      badge.dataset.tone = tone;
      setText(facts, told.filter(Boolean).join(" · "));
      node.title = title;
      for (const button of made.values()) button.setAttribute("aria-label", `${button.textContent.replace(" …", "")}: ${title}`);
    },
    allow(verbs) {
      for (const [verb, button] of made) button.hidden = !verbs.includes(verb);
      buttons.hidden = !verbs.length;
    },
  };
}

const AGENT_TONES = { __proto__: null, live: "good", starting: "warn", stopping: "warn", resting: "bad", remnant: "bad" };

function agent() {
  const view = row();
  const { node } = view;
  view.allow([]);
  return {
    node,
    update(it) {
      const steps = it.path.split("/");
      node.dataset.depth = Math.min(4, Math.max(0, steps.length / 2 - 1));
      view.set(steps.slice(-2).join("/"), it.state, AGENT_TONES[it.state] ?? "rest", [
        bytes(it.bytes),
        it.runs && many(it.runs, "run"),
        it.sockets && many(it.sockets, "socket"),
        it.jobs && many(it.jobs, "job"),
        it.dead_jobs && many(it.dead_jobs, "dead letter"),
        it.refs && many(it.refs, "keep-alive"),
        it.state === "remnant" && "its code was told to stop and goes on, cut off from everything; a restart of the server ends it",
        it.state === "resting" && "it failed too often; it is tried again by and by",
      ]);
    },
  };
}

const RUN_TONES = { __proto__: null, running: "good", completed: "rest", error: "bad", aborted: "warn", interrupted: "warn" };

function run(page) {
  let shown = null;
  const cancel = () => page.ask({
    title: "Cancel this run?",
    text: `${shown.path} and everything below it ends with “aborted”. That cannot be taken back.`,
    yes: "Cancel the run", verb: "cancel_run", id: shown.number,
  });
  const view = row({ timeline: true, actions: [{ verb: "cancel_run", text: "Cancel …", run: cancel }] });
  const { node } = view;
  return {
    node,
    update(it) {
      shown = it;
      node.dataset.run = it.run_id;
      node.dataset.status = it.status;
      const going = it.status === "running";
      view.set(below(it.path), going && it.phase !== "running" ? it.phase : it.status, RUN_TONES[it.status] ?? "rest", [
        `began ${clock(it.started_at)}`,
        `${going ? "for" : "took"} ${span(it.elapsed_s * 1000)}`,
        it.chunks !== null && many(it.chunks, "chunk"),
        it.attempt > 1 && `attempt ${it.attempt}`,
        it.detached && "detached",
        it.error ?? (it.cause !== "finished" && it.cause),
        it.preview,
      ]);
      const { from, to } = page.window;
      const width = Math.max(1, to - from);
      const end = it.completed_at ?? page.now;
      view.bar.style.left = `${(100 * (it.started_at - from)) / width}%`;
      view.bar.style.width = `${(100 * (end - it.started_at)) / width}%`;
      view.bar.dataset.tone = RUN_TONES[it.status] ?? "rest";
      view.allow(going ? ["cancel_run"] : []);
    },
  };
}

const WHY = {
  __proto__: null,
  time: (it, now) => `its time comes in ${span(it.due_at - now)}`,
  asked: () => "somebody asked for it now",
  retry: (it, now) => `try ${it.attempts} failed, the next is in ${span(it.due_at - now)}`,
  running: () => "it is being called",
  paused: () => "it waits until it is resumed",
};
const WHY_SHOWN = { __proto__: null, time: "planned", asked: "now" };
const DUE_TEXTS = {
  run_now: ["Run now …", "Run it now?", "Run it now", "is called at once. A recurring one goes on as planned."],
  replay: ["Replay …", "Replay it?", "Replay", "is called again, with new attempts."],
  redeliver: ["Redeliver …", "Tell it again?", "Redeliver", "is tried again, with new attempts."],
  resume: ["Resume …", "Resume it?", "Resume", "is called again when its time comes."],
  pause: ["Pause …", "Pause it?", "Pause", "is not called until somebody resumes it."],
  cancel: ["Cancel …", "Cancel it?", "Cancel it", "is taken back for good, with all its future calls."],
};

function jobActions(page, shown) {
  return Object.entries(DUE_TEXTS).map(([verb, [text, title, yes, what]]) => ({
    verb, text,
    run() {
      const it = shown();
      page.ask({ title, text: `${it.callback ?? it.what} of ${it.path} ${what}`, yes, verb, id: it.id });
    },
  }));
}

function due(page) {
  let shown = null;
  const view = row({ actions: jobActions(page, () => shown) });
  return {
    node: view.node,
    update(it) {
      shown = it;
      view.node.dataset.job = it.id;
      view.set(it.callback, WHY_SHOWN[it.why] ?? it.why, it.why === "retry" ? "warn" : it.why === "running" ? "good" : "rest", [
        (WHY[it.why] ?? (() => it.why))(it, page.now),
        moment(it.due_at),
        it.kind + (it.rule ? ` ${it.rule}` : "") + (it.tz ? ` ${it.tz}` : ""),
        below(it.path),
        it.error,
      ]);
      view.allow(it.acts);
    },
  };
}

function dead(page) {
  let shown = null;
  const view = row({ actions: jobActions(page, () => shown) });
  return {
    node: view.node,
    update(it) {
      shown = it;
      view.node.dataset.job = it.id;
      view.set(it.what, it.kind, "bad", [
        below(it.path), `${many(it.attempts, "attempt")} failed`, it.error, `last due ${moment(it.due_at)}`,
      ]);
      view.allow(it.acts);
    },
  };
}

function fiber(page) {
  const view = row();
  view.allow([]);
  return {
    node: view.node,
    update(it) {
      view.set(it.name, it.status, RUN_TONES[it.status] ?? "rest", [
        below(it.path),
        it.kind,
        `began ${clock(it.started_at)}`,
        it.completed_at ? `took ${span(it.completed_at - it.started_at)}` : `for ${span(page.now - it.started_at)}`,
        it.seen_at && `sign of life ${span(page.now - it.seen_at)} ago`,
        it.attempts > 1 && `attempt ${it.attempts}`,
        it.error,
      ]);
    },
  };
}

function effect() {
  const view = row();
  view.allow([]);
  return {
    node: view.node,
    update(it) {
      view.set(it.name, it.status, "warn", [below(it.path), `attempt ${it.attempt}`, `began ${moment(it.began_at)}`, it.error]);
    },
  };
}

function event() {
  const view = row();
  view.node.classList.add("event");
  view.allow([]);
  return {
    node: view.node,
    update(it) {
      const { at, channel, path, root, n, kind, id, run_id: run, ...rest } = it;
      const whose = run ?? id;
      view.set(channel, clock(at), "rest", [
        path ?? root,
        whose && `${run ? "run" : (kind ?? "number")} ${whose}`,
        ...Object.entries(rest).map(([key, value]) => `${key.replaceAll("_", " ")} ${value}`),
      ]);
    },
  };
}

/** The tabs: what to ask for, what to call a row, how it looks, what an empty list means. */
export const TABS = {
  tree: { title: "Agents", noun: ["agent", "agents"], key: (it) => it.slot + it.state, make: agent, nothing: "This root has no agents: it is being made, or deleted." },
  runs: { title: "Runs", noun: ["run", "runs"], key: (it) => it.number, make: run, nothing: "No run is kept. One appears here when an agent asks another to work as its tool." },
  due: { title: "Schedules", noun: ["thing is owed", "things are owed"], key: (it) => it.id, make: due, nothing: "Nothing is owed in the next seven days: no schedule, no queued call, no turn." },
  fibers: { title: "Fibers", noun: ["fiber or turn", "fibers and turns"], key: (it) => it.id, make: fiber, nothing: "No fiber and no turn is kept." },
  dead: { title: "Dead letters", noun: ["dead letter", "dead letters"], key: (it) => it.id, make: dead, nothing: "Nothing rests here: whatever failed is being tried again, or was given up by its agent." },
  effects: { title: "Uncertain", noun: ["effect", "effects"], key: (it) => it.id, make: effect, nothing: "No effect waits for a person to say whether it happened." },
  events: { title: "Events", noun: ["event", "events"], key: (it) => it.n, make: event, nothing: "Nothing has happened since this page was opened. What comes is shown at once." },
};
