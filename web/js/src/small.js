// What browsers and Node 20 do not have yet, or spell longer.

export const uuid = () => crypto.randomUUID();

export function withResolvers() {
  const made = {};
  made.promise = new Promise((resolve, reject) => Object.assign(made, { resolve, reject }));
  return made;
}
