// The package as npm would publish it: what is in it, and that it works where nothing else is.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, test } from "node:test";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";

import { build } from "esbuild";

const HERE = fileURLToPath(new URL(".", import.meta.url));
const PACKAGE = fileURLToPath(new URL("../../web/js/", import.meta.url));
const ENTRIES = ["culet", "culet/chat", "culet/http", "culet/reducer"]; // and culet/react
const read = (path) => readFileSync(path, "utf8");
const manifest = JSON.parse(read(join(PACKAGE, "package.json")));
const place = mkdtempSync(join(tmpdir(), "culet-package-"));
after(() => rmSync(place, { recursive: true, force: true }));

const npm = (...args) => execFileSync("npm", args, { cwd: PACKAGE, encoding: "utf8", stdio: ["ignore", "pipe", "ignore"] });

/** A project that has the published package and nothing else. */
const project = (() => {
  const [{ filename, files, unpackedSize }] = JSON.parse(npm("pack", "--json", "--pack-destination", place));
  const home = join(place, "project", "node_modules", "culet");
  mkdirSync(home, { recursive: true });
  execFileSync("tar", ["-xzf", join(place, filename), "-C", home, "--strip-components=1"]);
  return { root: join(place, "project"), home, files: files.map(({ path }) => path), unpackedSize };
})();

const run = (source) => {
  writeFileSync(join(project.root, "main.mjs"), source);
  const env = { PATH: process.env.PATH };
  return execFileSync(process.execPath, ["main.mjs"], { cwd: project.root, encoding: "utf8", env, stdio: "pipe" });
};

test("it holds the modules with their types, the README, the licence, and nothing else", () => {
  const modules = readdirSync(join(PACKAGE, "src")).map((name) => `src/${name}`);

  assert.deepEqual([...project.files].sort(), ["LICENSE", "README.md", "package.json", ...modules].sort());
  assert.ok(modules.every((name) => /\.(js|d\.ts)$/.test(name)), `${modules}`);
  assert.equal(read(join(project.home, "LICENSE")), read(join(PACKAGE, "../../LICENSE")));
  assert.ok(project.unpackedSize < 130_000, `${project.unpackedSize} bytes`);
});

test("it asks for nothing, and React only of who uses the hooks", () => {
  assert.deepEqual([manifest.dependencies, manifest.sideEffects, manifest.type], [undefined, false, "module"]);
  assert.deepEqual(Object.keys(manifest.peerDependencies), ["react"]);
  assert.equal(manifest.peerDependenciesMeta.react.optional, true);
  const python = read(join(PACKAGE, "../../pyproject.toml"));
  assert.equal(manifest.version, python.match(/^version = "(.*)"$/m)[1]);
  assert.equal(manifest.license, python.match(/^license = "(.*)"$/m)[1]);
});

test("each entry has its module and its types", () => {
  const entries = Object.keys(manifest.exports).filter((name) => name !== "./package.json");
  assert.deepEqual(entries.map((name) => name.replace(/^\./, "culet")).sort(), [...ENTRIES, "culet/react"].sort());
  for (const name of entries) {
    const { types, default: module, ...other } = manifest.exports[name];
    assert.deepEqual(other, {});
    assert.deepEqual(Object.keys(manifest.exports[name]), ["types", "default"], "the types first");
    for (const path of [types, module]) assert.ok(project.files.includes(path.slice(2)), path);
  }
});

test("without React everything but the hooks loads, and the hooks say what is missing", () => {
  const names = ENTRIES.map((name) => `...Object.keys(await import("${name}"))`);
  const said = run(`console.log([${names}].join(" "))`);
  for (const name of ["AgentClient", "applyChatFrame", "askOverHttp", "callsOfRuns"]) assert.match(said, new RegExp(`\\b${name}\\b`));
  assert.throws(() => run('await import("culet/react")'), /Cannot find package 'react'/);
  assert.throws(() => run('await import("culet/src/line.js")'), /ERR_PACKAGE_PATH_NOT_EXPORTED/);
});

async function bundled(source, more = {}) {
  const stdin = { contents: source, resolveDir: project.root };
  const made = await build({ stdin, bundle: true, minify: true, format: "esm", platform: "browser", write: false, logLevel: "silent", ...more });
  return made.outputFiles[0].contents;
}

test("a bundler takes only what is imported, and no React", async () => {
  const unused = await bundled('import "culet"; import "culet/chat"; import "culet/http";');
  const kebab = await bundled('import { kebab } from "culet"; console.log(kebab("A"));');
  const hooks = await bundled('export * from "culet/react";', { external: ["react"] });

  assert.equal(unused.length, 0, "without side effects nothing is left");
  assert.ok(kebab.length < 500, `${kebab.length} bytes`);
  assert.match(new TextDecoder().decode(hooks), /from"react"/);
  await assert.rejects(bundled('export * from "culet/react";'), /Could not resolve "react"/);
});

test("it is as small as the README says", async () => {
  const rows = [...read(join(PACKAGE, "README.md")).matchAll(/^\| `(import .*)` \| (\d+) kB \|$/gm)];
  assert.equal(rows.length, 4, "a table of what an import costs");
  for (const [, source, told] of rows) {
    const code = await bundled(`${source}; globalThis.kept = [${source.match(/\{(.*)\}/)[1]}];`, { external: ["react"] });
    const kilobytes = gzipSync(code, { level: 9 }).length / 1000;
    assert.ok(kilobytes <= Number(told) && kilobytes > Number(told) - 1, `${source}: ${kilobytes} kB, not ${told}`);
  }
});

for (const resolution of ["bundler", "node16", "nodenext"]) {
  test(`its types are strict and whole: ${resolution}`, () => {
    const options = { moduleResolution: resolution, module: resolution === "bundler" ? "esnext" : resolution };
    const compilerOptions = { ...options, strict: true, noEmit: true, target: "es2023", lib: ["es2023", "dom", "dom.iterable"],
      types: [], skipLibCheck: false, exactOptionalPropertyTypes: true, noUncheckedIndexedAccess: true };
    writeFileSync(join(project.root, "use.mts"), read(join(HERE, "types/use.ts")));
    writeFileSync(join(project.root, "tsconfig.json"), JSON.stringify({ compilerOptions, files: ["use.mts"] }));
    const tsc = join(HERE, "node_modules/typescript/bin/tsc");

    const said = execFileSync(process.execPath, [tsc, "-p", "."], { cwd: project.root, encoding: "utf8", stdio: "pipe" });

    assert.equal(said, "");
  });
}
