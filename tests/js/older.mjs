// `node --import ./older.mjs`: the tests of this folder with the packages of `older/`.
import { isBuiltin, register } from "node:module";

const HERE = new URL("./", import.meta.url).href;
// The chat hooks of that time are given the newer AI SDK, as who updates that alone has them; a
// file that asks for the SDK itself gets the one that was current when they were published.
const BEFORE = { ai: "ai-before", "@ai-sdk/react": "react-before" };

if (!import.meta.url.endsWith("?hook")) register(`${import.meta.url}?hook`);

/** Bare names that a file of this folder asks for come from `older/`, where they are there. */
export async function resolve(name, context, next) {
  const asks = context.parentURL ?? "";
  const ours = asks.startsWith(HERE) && !asks.includes("/node_modules/");
  if (!ours || isBuiltin(name) || /^[./]|^\w+:/.test(name)) return next(name, context);
  try {
    return await next(BEFORE[name] ?? name, { ...context, parentURL: `${HERE}older/any.mjs` });
  } catch (error) {
    if (error.code !== "ERR_MODULE_NOT_FOUND") throw error;
    return next(name, context);
  }
}
