// The demo's page in a real browser against Culet's demo server at CULET_URL.
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { join } from "node:path";
import { chromiumPath, openBrowser, openPage, PHONE, SHOTS, WIDE } from "./browser.mjs";

const URL_GIVEN = process.env.CULET_URL;
const QUESTION = "How does asyncio.Queue differ from queue.Queue, and what does trio use instead?";
const LONG = 120_000; // the library may have to be indexed first

/** Why this cannot run here, or false. In CI a missing browser is a failure. */
function reasonToSkip() {
  if (!URL_GIVEN) return "CULET_URL is not set";
  if (!chromiumPath() && !process.env.CI) return "there is no chromium";
  return false;
}

const options = { skip: reasonToSkip(), timeout: 240_000 };
const fresh = (name) => `${URL_GIVEN}/?chat=${name}-${crypto.randomUUID().slice(0, 8)}`;
let opened = null;
before(async () => {
  if (!options.skip) opened = await openBrowser();
});
after(() => opened?.close());

async function open(t, url, viewport = WIDE) {
  const { page, faults } = await openPage(opened.browser, url, viewport);
  page.setDefaultTimeout(LONG);
  t.after(() => page.close());
  return { page, faults };
}

const shot = (page, name) => page.screenshot({ path: join(SHOTS, `${name}.png`) });

async function ask(page, text) {
  await page.bringToFront(); // what is behind is not drawn
  await page.waitForSelector('#link[data-kind="open"]');
  await page.type("#question", text);
  await page.keyboard.press("Enter");
}

/** What stands on the page: `[{run, title, status, passages, text}]` of the last answer. */
const panels = (page) =>
  page.$$eval(".message", (messages) =>
    [...messages.at(-1).querySelectorAll(".panel")].map((panel) => ({
      run: panel.dataset.run,
      title: panel.querySelector(".panel-title").textContent,
      status: panel.dataset.status,
      passages: [...panel.querySelectorAll(".passage")].map((passage) => passage.textContent),
    })),
  );
const identities = (list) => list.map(({ run, title }) => [run, title]);

/** Looks at each change of the page: between two frames that are drawn much may come and go. */
const EACH_CHANGE = { polling: "mutation" };
const manyRunning = (page) =>
  page.waitForFunction(
    () => document.querySelectorAll('.panel[data-status="running"]').length >= 3,
    EACH_CHANGE,
  );
/** Presses the button in the moment that three run: by hand a busy machine comes too late. */
async function stopWhileManyRun(page) {
  const found = await page.waitForFunction(() => {
    if (document.querySelectorAll('.panel[data-status="running"]').length < 3) return false;
    const seen = [...document.querySelectorAll(".panel")].map((panel) => ({
      run: panel.dataset.run,
      title: panel.querySelector(".panel-title").textContent,
      status: panel.dataset.status,
    }));
    document.getElementById("stop").click();
    return seen;
  }, EACH_CHANGE);
  return found.jsonValue();
}
/** Follows a link. Not by the mouse: where it was when the mouse aimed, passages may be by now. */
const followed = (page, link) => Promise.all([page.waitForNavigation(), page.$eval(link, (found) => found.click())]);
const idle = (page) => page.waitForSelector("#stop", { hidden: true });
const wholeText = (page) => page.$eval("#log", (log) => log.innerText);

/** Scrolls nothing sideways, whatever the width. */
async function assertFits(page) {
  const [inner, wide] = await page.evaluate(() => [
    innerWidth,
    Math.max(document.documentElement.scrollWidth, document.getElementById("scroll").scrollWidth),
  ]);
  assert.ok(wide <= inner, `${wide} px in a window of ${inner}`);
}

test("a question is researched in panels side by side, through a reload, to an answer", options, async (t) => {
  const { page, faults } = await open(t, fresh("ask"));

  await ask(page, QUESTION);
  await manyRunning(page);
  await page.waitForFunction(() => document.querySelectorAll(".passage").length >= 2);
  const before = await panels(page);
  await shot(page, "page-wide-running");
  assert.ok(before.length >= 3, `${before.length} panels`);

  await page.reload();
  await page.waitForFunction((count) => document.querySelectorAll(".panel").length >= count, {}, before.length);
  await page.waitForFunction(() => document.querySelectorAll(".passage").length >= 2);
  const now = await panels(page);
  await shot(page, "page-wide-reloaded");
  assert.deepEqual(identities(now), identities(before));
  now.forEach(({ passages }, at) => {
    const known = before[at].passages;
    assert.deepEqual(passages.slice(0, known.length), known, "no passage lost or moved");
    assert.equal(new Set(passages).size, passages.length, "no passage doubled");
  });

  await idle(page);
  const ended = await panels(page);
  assert.deepEqual(identities(ended), identities(before));
  assert.deepEqual(new Set(ended.map(({ status }) => status)), new Set(["completed"]));
  const cites = await page.$$eval(".message:last-child > .message-body > .text .cite", (all) => all.length);
  assert.ok(cites >= 1, "the answer cites");
  const live = await wholeText(page);
  await shot(page, "page-wide-answer");

  await page.reload();
  await page.waitForFunction((length) => document.getElementById("log").innerText.length >= length, {}, live.length);
  assert.equal(await wholeText(page), live, "a reload shows the same picture");
  await assertFits(page);
  assert.deepEqual(faults, []);
});

test("stop aborts what still runs and leaves what was done", options, async (t) => {
  const { page, faults } = await open(t, fresh("stop"));
  await ask(page, QUESTION);
  const before = await stopWhileManyRun(page);
  await page.waitForFunction(() => !document.querySelector('.panel[data-status="running"]'), { timeout: 5_000 });
  await idle(page);

  const stopped = await panels(page); // a few more may have begun before the server heard of it
  assert.deepEqual(identities(stopped).slice(0, before.length), identities(before));
  assert.ok(stopped.some(({ status }) => status === "aborted"));
  for (const [at, { status }] of before.entries()) {
    if (status !== "running") assert.equal(stopped[at].status, status);
  }
  await shot(page, "page-wide-stopped");
  assert.deepEqual(faults, []);
});

test("a run can be opened, and the way back leads to the same chat", options, async (t) => {
  const { page, faults } = await open(t, fresh("drill"));
  await ask(page, QUESTION);
  await manyRunning(page);
  const run = (await panels(page))[0];

  await followed(page, `[data-run="${quoted(run.run)}"] .drill`);
  await page.waitForSelector(".message");
  await page.waitForFunction(() => document.querySelectorAll(".cite").length >= 1);
  assert.equal(await page.$eval("#composer", (form) => form.hidden), true);
  await shot(page, "page-wide-child");

  await followed(page, ".back");
  await page.waitForSelector(`[data-run="${quoted(run.run)}"]`);
  await idle(page);
  assert.deepEqual(faults, []);
});

test("what a run two levels below asks is answered on the page of the chat", options, async (t) => {
  const name = crypto.randomUUID().slice(0, 8);
  const both = [await open(t, `${URL_GIVEN}/?agent=Chief&chat=${name}`), await open(t, `${URL_GIVEN}/?agent=Chief&chat=${name}`, PHONE)];
  const [{ page }, { page: phone }] = both;
  await ask(page, "pay where");
  for (const one of [page, phone]) {
    await one.bringToFront();
    await one.waitForSelector(".ask-line");
  }
  assert.match(await phone.$eval(".ask-line", (line) => line.innerText), /May “pay” be done\?/);
  await assertFits(phone);
  await shot(phone, "page-phone-asks");

  await phone.tap(".ask-line .ask");

  for (const one of [phone, page]) {
    await one.bringToFront();
    await one.waitForSelector(".asks", { hidden: true });
  }
  for (const { faults } of both) assert.deepEqual(faults, []);
});

test("on a phone nothing is cut off, and clearing asks first", options, async (t) => {
  const { page, faults } = await open(t, fresh("phone"), PHONE);
  await page.waitForSelector(".example", { visible: true }); // not before it knows that nothing was said
  await shot(page, "page-phone-empty");
  await assertFits(page);

  await page.tap(".example");
  await manyRunning(page);
  await page.waitForSelector(".passage");
  await shot(page, "page-phone-running");
  await assertFits(page);
  await idle(page);
  await shot(page, "page-phone-answer");
  await assertFits(page);

  await page.tap("#clear");
  await page.tap("#confirm-no");
  assert.ok((await page.$$(".message")).length >= 2);
  await page.tap("#clear");
  await page.tap("#confirm-yes");
  await page.waitForSelector("#empty:not([hidden])");
  await page.reload();
  await page.waitForSelector("#empty:not([hidden])");
  assert.equal((await page.$$(".message")).length, 0);
  assert.deepEqual(faults, []);
});

/** Run ids are any text; inside an attribute selector only quotes and backslashes matter. */
function quoted(text) {
  return text.replace(/["\\]/g, "\\$&");
}
