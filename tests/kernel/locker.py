"""Another process that has locked databases: `python locker.py FILE...`, until stdin ends."""

from __future__ import annotations

import sqlite3
import sys

held = []
for path in sys.argv[1:]:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    held.append(connection)
print("locked", flush=True)
sys.stdin.read()
for connection in held:
    connection.execute("ROLLBACK")
    connection.close()
