// A TCP proxy whose connections can be cut, and refused until they are let in again.
import net from "node:net";

/** Resolves to `{host, cut, refuse, admit}`; it is gone after the test. */
export function cuttable(t, host) {
  const [name, port] = host.split(":");
  const open = new Set();
  let admits = true;
  const server = net.createServer((near) => {
    if (!admits) return near.destroy();
    const far = net.connect({ host: name, port: Number(port), noDelay: true });
    for (const [one, other] of [[near, far], [far, near]]) {
      open.add(one);
      one.on("error", () => other.destroy());
      one.on("close", () => {
        open.delete(one);
        other.destroy();
      });
      one.pipe(other);
    }
  });
  const cut = () => open.forEach((socket) => socket.destroy());
  t.after(() => {
    server.close();
    cut();
  });
  const proxy = {
    cut,
    refuse: () => {
      admits = false;
      cut();
    },
    admit: () => {
      admits = true;
    },
  };
  return new Promise((resolve) => {
    server.listen(0, "127.0.0.1", () => resolve({ ...proxy, host: `127.0.0.1:${server.address().port}` }));
  });
}
