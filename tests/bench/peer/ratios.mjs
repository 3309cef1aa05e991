// node ratios.mjs [results.json] -> a markdown table: peer, culet, and how many times as good
import { readFileSync } from "node:fs";
const R = JSON.parse(readFileSync(process.argv[2] ?? "results.json", "utf8"));
const peer = R.targets.peer?.metrics ?? {}, ours = R.targets.culet?.metrics ?? {};
const f = (v) => (v === undefined ? "-" : v >= 1000 ? Math.round(v).toLocaleString("en-US") : String(Number(v.toPrecision(3))));
console.log("| metric | unit | peer | culet | culet is … times as good | server CPU a unit, peer / culet (µs) |\n|---|---|---:|---:|---:|---|");
for (const id of [...new Set([...Object.keys(peer), ...Object.keys(ours)])].sort((a, b) => a.localeCompare(b, "en", { numeric: true }))) {
  const p = peer[id], o = ours[id], unit = (o ?? p).unit;
  const lower = unit === "ms" || unit === "us" || unit === "MiB";
  const ratio = p && o ? f(lower ? p.median / o.median : o.median / p.median) : "skipped";
  const cpu = [p, o].map((x) => f(x?.serverCpuUsPerOp)).join(" / ");
  console.log(`| ${id} | ${unit} | ${f(p?.median)} | ${f(o?.median)} | ${ratio} | ${cpu} |`);
}
for (const [name, t] of Object.entries(R.targets)) {
  const bad = Object.entries(t.notes ?? {}).filter(([k]) => !k.endsWith("MiB") && !k.includes(".before"));
  if (bad.length) console.log(`\n${name}: ` + bad.map(([k, v]) => `${k}: ${v}`).join("; "));
}
