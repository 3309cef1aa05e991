// The page while its server is killed with SIGKILL in mid-run and started again.
// CULET_CMD starts the demo server: `{port}` and `{dir}` are put in. CULET_DIR is that folder.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import net from "node:net";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { chromiumPath, openBrowser, openPage, SHOTS, WIDE } from "./browser.mjs";

const COMMAND = process.env.CULET_CMD;
const QUESTION = "How does asyncio.Queue differ from queue.Queue, and what does trio use instead?";

function reasonToSkip() {
  if (!COMMAND || !process.env.CULET_DIR) return "CULET_CMD or CULET_DIR is not set";
  if (!chromiumPath() && !process.env.CI) return "there is no chromium";
  return false;
}

const options = { skip: reasonToSkip(), timeout: 120_000 };
let opened = null;
before(async () => {
  if (!options.skip) opened = await openBrowser();
});
after(() => opened?.close());

const freePort = () =>
  new Promise((done) => {
    const server = net.createServer().listen(0, "127.0.0.1", () => {
      const { port } = server.address();
      server.close(() => done(port));
    });
  });

/** Starts the server and waits until it listens; `kill` is SIGKILL and waits for the end. */
async function start(port, dir) {
  const [bin, ...args] = COMMAND.replaceAll("{port}", port).replaceAll("{dir}", dir).split(" ");
  const child = spawn(bin, args, { stdio: ["ignore", "pipe", "inherit"] });
  const ended = new Promise((done) => child.once("exit", done));
  await new Promise((done, fail) => {
    child.stdout.once("data", done);
    child.once("exit", (code) => fail(new Error(`the server ended with ${code}`)));
  });
  return { kill: () => (child.kill("SIGKILL"), ended) };
}

const panels = (page) =>
  page.$$eval(".panel", (all) =>
    all.map((panel) => [panel.dataset.run, panel.querySelector(".panel-title").textContent]),
  );

test("kill -9 in mid-run: the page comes back by itself, goes on, and doubles nothing", options, async (t) => {
  const dir = process.env.CULET_DIR; // kept: the doctor looks at it
  const port = await freePort();
  let server = await start(port, dir);
  t.after(() => server.kill());
  const url = `http://127.0.0.1:${port}/?chat=survive`;
  const { page, faults } = await openPage(opened.browser, url, WIDE);
  page.setDefaultTimeout(60_000);
  await page.waitForSelector('#link[data-kind="open"]');
  await page.type("#question", QUESTION);
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelectorAll('.panel[data-status="running"]').length >= 3);
  const before = await panels(page);

  await server.kill();
  await page.waitForFunction(() => document.querySelector("#link").dataset.kind !== "open");
  await page.screenshot({ path: join(SHOTS, "page-wide-killed.png") });
  server = await start(port, dir);

  await page.waitForSelector('#link[data-kind="open"]');
  await page.waitForSelector("#stop", { hidden: true });
  await page.waitForFunction(() => [...document.querySelectorAll(".panel")].every((p) => p.dataset.status === "completed"));
  const kept = await panels(page);
  assert.deepEqual(kept, before);
  await page.screenshot({ path: join(SHOTS, "page-wide-survived.png") });
  const shown = await page.$eval(".message.from-assistant", (m) => m.innerText);
  assert.equal(await page.$$eval(".message", (all) => all.length), 2);

  const history = await (await fetch(`http://127.0.0.1:${port}/agents/assistant/survive/get-messages`)).json();
  const answer = history.at(-1).parts.filter((p) => p.type === "text").map((p) => p.text).join("");
  for (const line of ["I look into", "Sources"]) {
    assert.equal(answer.split(line).length, 2, `${line} stands once in the answer`);
    assert.equal(shown.split(line).length, 2, `${line} stands once on the page`);
  }
  await page.reload();
  await page.waitForSelector('#link[data-kind="open"]');
  await page.waitForFunction((count) => document.querySelectorAll(".panel").length === count, {}, before.length);
  assert.deepEqual(await panels(page), before);
  assert.equal(await page.$eval(".message.from-assistant", (m) => m.innerText), shown);
  assert.deepEqual(faults, []);
});
