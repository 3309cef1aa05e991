// What can go wrong, by who can act.

/** The method, or the turn, failed; the message is what the server says in public. */
export class CallFailed extends Error {
  name = "CallFailed";
}

/** The socket went before the answer came: it may have happened or not. */
export class ConnectionLost extends Error {
  name = "ConnectionLost";

  constructor(code, reason) {
    super(`the connection was lost (${code}${reason ? `, ${reason}` : ""})`);
    this.code = code;
  }
}

/** There will be no other connection: it was closed, or the server refuses. */
export class ConnectionEnded extends Error {
  name = "ConnectionEnded";

  constructor(code, reason) {
    super(`the connection has ended (${code}${reason ? `, ${reason}` : ""})`);
    this.code = code;
  }
}

/** The caller is wrong. */
export class UsageError extends Error {
  name = "UsageError";
}
