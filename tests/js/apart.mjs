// A network on which frames come apart: a TCP proxy that gives each frame from the server a
// segment of its own, GAP_MS after the one before. What a client must see as one step is
// what the server sends as one frame; everything between two frames may happen there.
import net from "node:net";

const GAP_MS = 20;
const UPGRADED = /^HTTP\/1\.1 101/;
const END_OF_HEAD = "\r\n\r\n";

/** Resolves to the `host:port` of a proxy in front of `host`; it is gone after the test. */
export function apart(t, host) {
  const [name, port] = host.split(":");
  const open = new Set();
  const server = net.createServer((near) => {
    const far = net.connect({ host: name, port: Number(port), noDelay: true });
    for (const [one, other] of [[near, far], [far, near]]) {
      open.add(one);
      one.on("error", () => other.destroy());
      one.on("close", () => {
        open.delete(one);
        other.end();
      });
    }
    near.setNoDelay(true);
    near.pipe(far);
    spread(far, near);
  });
  t.after(() => {
    server.close();
    for (const socket of open) socket.destroy();
  });
  return new Promise((resolve) => {
    server.listen(0, "127.0.0.1", () => resolve(`127.0.0.1:${server.address().port}`));
  });
}

/** Hands on the answer to one request: frames apart, anything else as it comes. */
async function spread(from, to) {
  let held = Buffer.alloc(0);
  let size = sizeOfHead;
  try {
    for await (const data of from) {
      held = Buffer.concat([held, data]);
      if (size === sizeOfHead && !UPGRADED.test(held)) size = sizeOfAll;
      for (let n = size(held); n > 0 && n <= held.length; n = size(held)) {
        to.write(held.subarray(0, n));
        held = held.subarray(n);
        if (size === sizeOfHead) size = sizeOfFrame;
        await new Promise((resolve) => setTimeout(resolve, GAP_MS));
      }
    }
  } catch {
    // a connection that was cut: what was held is lost with it
  }
  to.end();
}

const sizeOfAll = (bytes) => bytes.length;

/** How many bytes the head of the answer to an upgrade has; 0: not known yet. */
function sizeOfHead(bytes) {
  const at = bytes.indexOf(END_OF_HEAD);
  return at < 0 ? 0 : at + END_OF_HEAD.length;
}

/** How many bytes the first frame has, its head included; 0: not known yet. */
function sizeOfFrame(bytes) {
  if (bytes.length < 2) return 0;
  const short = bytes[1] & 0x7f;
  const head = { 126: 4, 127: 10 }[short] ?? 2;
  if (bytes.length < head) return 0;
  if (head === 2) return head + short;
  return head + (head === 4 ? bytes.readUInt16BE(2) : Number(bytes.readBigUInt64BE(2)));
}
