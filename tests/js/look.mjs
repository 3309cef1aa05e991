// Takes pictures of the page playing the scripted session, for people to look at.
import { join } from "node:path";
import { openBrowser, openPage, PHONE, SHOTS, WIDE } from "./browser.mjs";
import { startFake } from "./fake-gateway.mjs";

const fake = await startFake({ pace: 25 });
const { browser, close } = await openBrowser();
const shot = (page, name) => page.screenshot({ path: join(SHOTS, `${name}.png`) });
const QUESTION = "How does asyncio.Queue differ from queue.Queue, and what does trio use instead?";

async function session(name, viewport, dark) {
  const { page, faults } = await openPage(browser, `${fake.url}/?chat=${name}`, viewport);
  if (dark) {
    await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: "dark" }]);
  }
  await page.waitForSelector("#empty:not([hidden])");
  await shot(page, `${name}-1-empty`);
  await page.type("#question", QUESTION);
  await page.keyboard.press("Enter");
  await new Promise((done) => setTimeout(done, 150));
  await shot(page, `${name}-2-waiting`);
  await page.waitForFunction(() => document.querySelectorAll(".passage").length >= 3);
  await shot(page, `${name}-3-running`);
  await page.reload();
  await page.waitForFunction(() => document.querySelectorAll(".panel").length === 3);
  await page.waitForSelector('[data-status="completed"]');
  await shot(page, `${name}-4-reloaded`);
  await page.waitForFunction(() => document.body.innerText.includes("coroutine until"));
  await shot(page, `${name}-5-answering`);
  await page.waitForSelector("#stop", { hidden: true });
  await shot(page, `${name}-6-done`);
  await page.type("#question", "And what about a broken run?");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelectorAll('[data-status="error"]').length === 1);
  await page.click("#stop");
  await page.waitForSelector("#stop", { hidden: true });
  await shot(page, `${name}-7-stopped`);
  const href = await page.$eval(".panel .drill", (link) => link.href);
  await page.click("#clear");
  await shot(page, `${name}-8-clear`);
  await page.click("#confirm-no");
  fake.drop();
  await page.waitForSelector('#link[data-kind="waiting"]');
  await shot(page, `${name}-9-lost`);
  await page.goto(href);
  await page.waitForSelector(".tool");
  await shot(page, `${name}-10-child`);
  if (faults.length > 0) console.error(name, faults);
  await page.close();
}

await session("wide", WIDE, false);
await session("wide-dark", WIDE, true);
await session("phone", PHONE, false);
await close();
await fake.close();
