// One headless Chromium for a test: a profile of its own, no request that leaves the machine.
import { existsSync } from "node:fs";
import { mkdtemp, mkdir, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import puppeteer from "puppeteer-core";

export const SHOTS = fileURLToPath(new URL("./shots/", import.meta.url));
export const WIDE = { width: 1280, height: 860, deviceScaleFactor: 1 };
export const PHONE = { width: 390, height: 844, deviceScaleFactor: 2, isMobile: true, hasTouch: true };

/** The browser's path, or null when there is none. */
export function chromiumPath() {
  const places = [process.env.CHROMIUM, "/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
  return places.find((place) => place && existsSync(place)) ?? null;
}

/** `{browser, close}`; closing removes the profile as well. */
export async function openBrowser() {
  const profile = await mkdtemp(join(tmpdir(), "culet-chromium-"));
  await mkdir(SHOTS, { recursive: true });
  const browser = await puppeteer.launch({
    executablePath: chromiumPath(),
    userDataDir: profile,
    args: [
      "--no-sandbox",
      "--disable-dev-shm-usage",
      "--disable-gpu",
      "--disable-background-networking",
      "--disable-component-update",
      "--disable-sync",
      "--no-first-run",
    ],
  });
  const close = async () => {
    await browser.close();
    await rm(profile, { recursive: true, force: true, maxRetries: 5 });
  };
  return { browser, close };
}

/** A page that notes everything that must not happen: errors, refused loads, foreign requests. */
export async function openPage(browser, url, viewport = WIDE) {
  const page = await browser.newPage();
  const faults = [];
  page.on("pageerror", (error) => faults.push(`error: ${error.message}`));
  page.on("console", (message) => {
    const text = message.text();
    const lost = /WebSocket connection|ERR_CONNECTION|Failed to load resource/.test(text);
    if (message.type() === "error" && !lost) faults.push(`console: ${text}`);
  });
  page.on("request", (request) => {
    const { host, protocol } = new URL(request.url());
    if (host !== new URL(url).host && protocol !== "data:") faults.push(`foreign: ${request.url()}`);
  });
  await page.setViewport(viewport);
  await page.goto(url, { waitUntil: "load" });
  return { page, faults };
}
