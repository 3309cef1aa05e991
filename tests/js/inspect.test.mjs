// The inspector in a real browser against the server at CULET_URL (inspect-server.py).
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { join } from "node:path";
import { AgentClient } from "culet";
import WebSocket from "ws";
import { chromiumPath, openBrowser, openPage, PHONE, SHOTS, WIDE } from "./browser.mjs";

const URL_GIVEN = process.env.CULET_URL;

/** Why this cannot run here, or false. In CI a missing browser is a failure. */
function reasonToSkip() {
  if (!URL_GIVEN) return "CULET_URL is not set";
  if (!chromiumPath() && !process.env.CI) return "there is no chromium";
  return false;
}

const options = { skip: reasonToSkip(), timeout: 60_000 };
let opened = null;
before(async () => {
  if (!options.skip) opened = await openBrowser();
});
after(() => opened?.close());

const shot = (page, name) => page.screenshot({ path: join(SHOTS, `${name}.png`) });

/** An office of its own, with a run of many words, a plan and a letter that is dead. */
async function office(t) {
  const name = `o-${crypto.randomUUID().slice(0, 8)}`;
  const client = new AgentClient({ agent: "Office", name, host: URL_GIVEN }, { WebSocket });
  t.after(() => client.close());
  await client.ready;
  await client.call("begin", ["writing", 100_000]);
  await client.call("begin", ["done", 3]);
  const [ring, report, breaks] = await client.call("plan", []);
  return { name, client, ring, report, breaks };
}

async function open(t, tab, name, viewport = WIDE) {
  const { page, faults } = await openPage(opened.browser, `${URL_GIVEN}/inspect#${tab}/Office/${name}`, viewport);
  page.setDefaultTimeout(20_000);
  t.after(() => page.close());
  await page.waitForSelector('#link[data-kind="open"]');
  await page.waitForSelector(".row");
  return { page, faults };
}

const confirm = async (page) => {
  await page.waitForSelector("dialog[open]");
  await page.click("#ask-yes");
};
/** Presses a button of a row. Not by the mouse: the page is drawn again while that aims. */
async function pressIn(page, row, verb) {
  const button = await page.waitForSelector(`${row} button[data-verb="${verb}"]`, { visible: true });
  await button.evaluate((found) => found.click());
}
const texts = (page, selector) => page.$$eval(selector, (nodes) => nodes.map((node) => node.textContent));

test("the tree of agents is shown, and grows by itself", options, async (t) => {
  const { name, client } = await office(t);
  const { page, faults } = await open(t, "tree", name);
  await page.waitForFunction(() => document.querySelectorAll(".row").length === 3);
  assert.deepEqual((await texts(page, ".row .name")).sort(), [`Office/${name}`, "Slow/done", "Slow/writing"].sort());
  assert.equal(await page.$eval('.roots a[aria-current="true"] .name', (node) => node.textContent), `Office/${name}`);
  await client.call("begin", ["another", 100_000]);
  await page.waitForFunction(() => document.querySelectorAll(".row").length === 4);
  await shot(page, "inspect-tree");
  assert.deepEqual(faults, []);
});

test("a run's timeline grows live, and a cancel asks before it acts", options, async (t) => {
  const { name } = await office(t);
  const { page, faults } = await open(t, "runs", name);
  const row = '.row[data-run="writing"]';
  const chunks = () => page.$eval(`${row} .facts`, (node) => Number(/(\d+) chunk/.exec(node.textContent)?.[1] ?? 0));
  const seen = await chunks();
  await page.waitForFunction(
    (at, before) => Number(/(\d+) chunk/.exec(document.querySelector(at).textContent)?.[1] ?? 0) > before,
    {}, `${row} .facts`, seen,
  );
  const width = (run) => page.$eval(`.row[data-run="${run}"] .bar`, (node) => node.getBoundingClientRect().width);
  assert.ok((await width("writing")) > (await width("done")), "what goes on is longer than what is over");
  await shot(page, "inspect-runs");

  await pressIn(page, row, "cancel_run");
  await page.waitForSelector("dialog[open]");
  await shot(page, "inspect-confirm");
  await page.click("#ask-no");
  const before = await chunks();
  await page.waitForFunction(
    (at, known) => Number(/(\d+) chunk/.exec(document.querySelector(at).textContent)?.[1] ?? 0) > known,
    {}, `${row} .facts`, before,
  );
  await pressIn(page, row, "cancel_run");
  await confirm(page);
  await page.waitForSelector(`${row}[data-status="aborted"]`);
  assert.equal(await page.$(`${row} button:not([hidden])`), null, "what is over cannot be cancelled");
  assert.deepEqual(faults, []);
});

test("a planned call says why it comes next, and is made now when somebody says so", options, async (t) => {
  const { name, client, ring, report } = await office(t);
  const { page, faults } = await open(t, "due", name);
  const facts = (job) => page.$eval(`.row[data-job="${job}"] .facts`, (node) => node.textContent);
  assert.match(await facts(ring), /its time comes in .*min/);
  assert.match(await facts(report), /cron 0 7 \* \* \*/);
  await shot(page, "inspect-due");
  assert.equal(await client.call("called", []), 0);
  await pressIn(page, `.row[data-job="${ring}"]`, "run_now");
  await confirm(page);
  await page.waitForFunction((job) => !document.querySelector(`.row[data-job="${job}"]`), {}, ring);
  assert.equal(await client.call("called", []), 1);
  await pressIn(page, `.row[data-job="${report}"]`, "pause");
  await confirm(page);
  await page.waitForSelector(`.row[data-job="${report}"] button[data-verb="resume"]:not([hidden])`);
  assert.deepEqual(faults, []);
});

test("a dead letter is replayed, and events say what happens, without secrets", options, async (t) => {
  const { name, breaks } = await office(t);
  const { page, faults } = await open(t, "dead", name);
  await page.waitForSelector(`.row[data-job="${breaks}"]`);
  await shot(page, "inspect-dead");
  await pressIn(page, `.row[data-job="${breaks}"]`, "replay");
  await confirm(page);
  await page.waitForFunction(() => document.querySelector("#said").textContent === "Done.");
  await page.click('#tabs a[data-tab="events"]');
  await page.waitForFunction(() => [...document.querySelectorAll(".row .name")].some((n) => n.textContent === "schedule:error"));
  await shot(page, "inspect-events");
  assert.doesNotMatch(await page.content(), /canary/);
  assert.deepEqual(faults, []);
});

test("a root that sleeps is found, and looked into without waking its agents", options, async (t) => {
  const name = `s-${crypto.randomUUID().slice(0, 8)}`;
  const client = new AgentClient({ agent: "Office", name, host: URL_GIVEN }, { WebSocket });
  await client.ready;
  await client.call("begin", ["done", 1]);
  client.close();
  const { page, faults } = await openPage(opened.browser, `${URL_GIVEN}/inspect#runs/Office/${name}`, PHONE);
  t.after(() => page.close());
  await page.waitForSelector("#asleep:not([hidden])");
  assert.match(await page.$eval("#nothing", (node) => node.textContent), /sleeps.*starts none of its agents/);
  await page.type("#find", "nobody has this");
  await page.waitForSelector("#no-roots:not([hidden])");
  await page.$eval("#find", (node) => (node.value = ""));
  await page.type("#find", name.toUpperCase());
  await page.waitForFunction((only) => {
    const names = [...document.querySelectorAll("#roots .name")].map((node) => node.textContent);
    return names.length === 1 && names[0] === only;
  }, {}, `Office/${name}`);
  await shot(page, "inspect-phone-asleep");
  await page.waitForSelector("#look-inside", { visible: true });
  await page.click("#look-inside");
  await page.waitForSelector('.row[data-run="done"][data-status="completed"]');
  await page.click('#tabs a[data-tab="tree"]');
  await page.waitForFunction(() => document.querySelectorAll(".row").length === 2);
  assert.deepEqual(await texts(page, ".row .badge"), ["sleeping", "sleeping"], "nobody was woken");
  await shot(page, "inspect-phone-inside");
  assert.deepEqual(faults, []);
});

test("fibers and remnants are shown, a long list goes on, tabs go by the keyboard", options, async (t) => {
  const { name, client } = await office(t);
  await client.call("weave", [105]);
  await client.call("cling", []);
  t.after(() => client.call("release", []).catch(() => {}));
  const { page, faults } = await open(t, "tree", name);
  await page.waitForFunction(() => [...document.querySelectorAll(".row .badge")].some((n) => n.textContent === "remnant"));
  assert.match(await page.$eval("#counts", (node) => node.textContent), /1 remnant/);
  assert.match((await texts(page, ".row .facts")).join(), /cut off from everything/);
  await shot(page, "inspect-remnant");
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: "dark" }]);
  await shot(page, "inspect-remnant-dark");
  await page.focus('#tabs a[data-tab="tree"]');
  for (const tab of ["runs", "due", "fibers"]) {
    await page.keyboard.press("ArrowRight");
    await page.waitForSelector(`#tabs a[data-tab="${tab}"][aria-selected="true"]`);
    assert.equal(await page.evaluate(() => document.activeElement.dataset.tab), tab);
  }
  await page.waitForFunction(() => {
    const names = [...document.querySelectorAll(".row .name")].map((node) => node.textContent);
    return names.includes("f0") && names.includes("f1");
  });
  await page.waitForSelector("#next", { visible: true });
  await page.click("#next");
  await page.waitForFunction(() => document.querySelectorAll(".row").length < 20);
  assert.ok((await texts(page, ".row .name")).includes("f104"));
  await page.click("#first");
  await page.waitForFunction(() => document.querySelectorAll(".row").length === 100);
  assert.equal(await page.$$eval("button", (nodes) => nodes.filter((n) => !(n.getAttribute("aria-label") ?? n.textContent).trim() && n.id !== "ask-yes").length), 0);
  assert.deepEqual(faults, []);
});

test("when the server cannot be read the page says so, and what it shows stays", options, async (t) => {
  const { name } = await office(t);
  const { page } = await open(t, "tree", name);
  await page.setOfflineMode(true);
  await page.waitForSelector("#problem:not([hidden])");
  assert.match(await page.$eval("#problem", (node) => node.textContent), /tried again every 2 s/);
  assert.ok((await page.$$(".row")).length >= 1);
  await shot(page, "inspect-offline");
  await page.setOfflineMode(false);
  await page.waitForSelector("#problem", { hidden: true });
});

test("on a phone nothing scrolls sideways, in light and in dark", options, async (t) => {
  const { name } = await office(t);
  const { page, faults } = await open(t, "tree", name, PHONE);
  for (const scheme of ["light", "dark"]) {
    await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
    for (const tab of ["tree", "runs", "due", "dead", "fibers", "effects", "events"]) {
      await page.click(`#tabs a[data-tab="${tab}"]`);
      await page.waitForSelector(`#tabs a[data-tab="${tab}"][aria-selected="true"]`);
      await page.waitForFunction(() => document.querySelector(".row") || !document.querySelector("#nothing").hidden);
      const [wide, view] = await page.evaluate(() => [document.documentElement.scrollWidth, window.innerWidth]);
      assert.ok(wide <= view && view === 390, `${tab}: ${wide} of ${view}`);
      await shot(page, `inspect-phone-${tab}-${scheme}`);
    }
  }
  await page.click('#tabs a[data-tab="runs"]');
  await page.waitForSelector('.row[data-run="writing"] button');
  await pressIn(page, '.row[data-run="writing"]', "cancel_run");
  await page.waitForSelector("dialog[open]");
  await shot(page, "inspect-phone-confirm");
  const inside = await page.$eval("dialog", (node) => node.getBoundingClientRect().right <= window.innerWidth);
  assert.ok(inside);
  assert.deepEqual(faults, []);
});
