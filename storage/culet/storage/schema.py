"""The stored format: every table, and the numbered steps that lead to it.

`tree.db` is the kernel's own and holds what decides; an agent's file holds what the
agent says. User SQL reaches the agent's file only and never its `culet_` tables.
Each step runs in one transaction with its own record (`user_version`).
"""

from __future__ import annotations

from typing import Final

_STATUSES: Final = "('running','completed','error','aborted','interrupted')"
_FREE: Final = "held IS NULL AND dead = 0 AND paused = 0"
_LINES: Final = "\n".join(
    f"""  {of}_limit INTEGER CHECK ({of}_limit >= 0),
  {of}_spent INTEGER NOT NULL DEFAULT 0 CHECK ({of}_spent >= 0),
  {of}_held INTEGER NOT NULL DEFAULT 0
    CHECK ({of}_held >= 0 AND {of}_spent + {of}_held <= {of}_limit),
  {of}_over INTEGER NOT NULL DEFAULT 0 CHECK ({of}_over >= 0),"""
    for of in ("tokens", "cost", "calls")
)

_PLACES: Final = """
-- Where the frames of runs lie in the one order of the tree; see decision 0013.
ALTER TABLE run ADD COLUMN place INTEGER;     -- of the start
ALTER TABLE run ADD COLUMN end_place INTEGER; -- set with the end
DROP TRIGGER run_absorbs;
UPDATE run SET place = born;
UPDATE run SET end_place = (SELECT max(born) FROM run) + ended.rank FROM (
    SELECT born AS run, row_number() OVER (ORDER BY completed_at, born DESC) AS rank
    FROM run WHERE status <> 'running') AS ended
  WHERE run.born = ended.run;
CREATE TRIGGER run_absorbs BEFORE UPDATE ON run WHEN OLD.status <> 'running'
BEGIN SELECT RAISE(ABORT, 'a terminal status is for good'); END;
CREATE INDEX run_place ON run (place);
CREATE INDEX run_end ON run (end_place);
CREATE TABLE gone (
  place INTEGER PRIMARY KEY,
  owner TEXT NOT NULL,                     -- slot of who had it, and is still there
  kind TEXT NOT NULL CHECK (kind IN ('cleared', 'deleted', 'trimmed')),
  path TEXT NOT NULL,
  run_id TEXT,
  parent_run_id TEXT,
  frame TEXT NOT NULL                      -- JSON
) STRICT;
CREATE INDEX gone_owner ON gone (owner);
"""

TREE: Final[tuple[str, ...]] = (
    f"""
CREATE TABLE meta (
  key TEXT PRIMARY KEY,
  value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE node (
  born INTEGER PRIMARY KEY AUTOINCREMENT,  -- siblings stop in reverse of this order
  slot TEXT NOT NULL UNIQUE,               -- one life; never used again
  parent TEXT,                             -- slot of the parent, NULL for the root
  class TEXT NOT NULL,
  name TEXT NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('live', 'gone')),
  created_at INTEGER NOT NULL,
  upgraded_from TEXT
) STRICT;
CREATE UNIQUE INDEX node_address ON node (ifnull(parent, ''), class, name)
  WHERE state = 'live';
CREATE INDEX node_parent ON node (parent, born);

CREATE TABLE run (
  born INTEGER PRIMARY KEY AUTOINCREMENT,
  owner TEXT NOT NULL,                     -- slot of the parent that asked
  id TEXT NOT NULL,
  child TEXT NOT NULL,                     -- slot of the facet that runs
  class TEXT NOT NULL,
  asker TEXT,                              -- run or fiber of the owner that waits for it
  tool_call_id TEXT,
  display_order INTEGER NOT NULL,
  display TEXT,                            -- JSON
  preview TEXT,                            -- JSON; never the raw input
  input_digest TEXT NOT NULL,
  detached TEXT,                           -- JSON of the Detached policy
  status TEXT NOT NULL CHECK (status IN {_STATUSES}),
  reason TEXT,
  error TEXT,
  output TEXT,                             -- JSON
  summary TEXT,
  usage TEXT,                              -- JSON
  n INTEGER,                               -- length of the stream, set with the end
  started_at INTEGER NOT NULL,
  completed_at INTEGER,
  UNIQUE (owner, id),
  CHECK ((status = 'running') = (completed_at IS NULL)),
  CHECK ((status = 'running') = (n IS NULL))
) STRICT;
CREATE INDEX run_child ON run (child);
CREATE INDEX run_asker ON run (owner, asker) WHERE status = 'running';
CREATE TRIGGER run_absorbs BEFORE UPDATE ON run WHEN OLD.status <> 'running'
BEGIN SELECT RAISE(ABORT, 'a terminal status is for good'); END;

CREATE TABLE fiber (
  born INTEGER PRIMARY KEY AUTOINCREMENT,
  owner TEXT NOT NULL,
  id TEXT NOT NULL,
  kind TEXT NOT NULL CHECK (kind IN ('fiber', 'turn')),
  name TEXT NOT NULL,
  key TEXT,
  asker TEXT,                              -- run or fiber of the owner that started it
  metadata TEXT,                           -- JSON
  status TEXT NOT NULL CHECK (status IN {_STATUSES}),
  reason TEXT,
  error TEXT,
  result TEXT,                             -- JSON
  n INTEGER,                               -- a turn's stream length, set with the end
  started_at INTEGER NOT NULL,
  completed_at INTEGER,
  UNIQUE (owner, id),
  CHECK ((status = 'running') = (completed_at IS NULL))
) STRICT;
CREATE UNIQUE INDEX fiber_key ON fiber (owner, key) WHERE key IS NOT NULL;
CREATE INDEX fiber_open ON fiber (owner) WHERE status = 'running';
CREATE TRIGGER fiber_absorbs BEFORE UPDATE ON fiber WHEN OLD.status <> 'running'
BEGIN SELECT RAISE(ABORT, 'a terminal status is for good'); END;

CREATE TABLE job (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  owner TEXT NOT NULL,                     -- slot
  kind TEXT NOT NULL CHECK (kind IN
    ('call', 'queue', 'fiber', 'turn', 'hook', 'deliver', 'limit', 'wipe')),
  what TEXT NOT NULL,                      -- method, run id, fiber id, slot to wipe
  payload TEXT,                            -- JSON
  every TEXT,                              -- JSON of the recurrence, NULL: once
  at INTEGER NOT NULL,                     -- the instant that it is for
  due_at INTEGER NOT NULL,                 -- not before; moved by back-off
  lane TEXT NOT NULL,                      -- one worker per owner and lane
  key TEXT,                                -- idempotency
  retry TEXT,                              -- JSON of Retry, NULL: the default
  attempts INTEGER NOT NULL DEFAULT 0,     -- without progress
  begun INTEGER NOT NULL DEFAULT 0 CHECK (begun IN (0, 1)),
  held INTEGER,                            -- take number: (life of the tree, counter)
  paused INTEGER NOT NULL DEFAULT 0 CHECK (paused IN (0, 1)),
  dead INTEGER NOT NULL DEFAULT 0 CHECK (dead IN (0, 1)),
  error TEXT,
  snapshot TEXT,                           -- JSON of the last stash
  created_at INTEGER NOT NULL
) STRICT;
CREATE INDEX job_due ON job (due_at, id) WHERE {_FREE};
CREATE INDEX job_lane ON job (owner, lane, due_at, id) WHERE {_FREE};
CREATE INDEX job_queue ON job (owner, lane, id) WHERE kind = 'queue' AND {_FREE};
CREATE INDEX job_owner ON job (owner, kind, what);
CREATE UNIQUE INDEX job_key ON job (owner, kind, key) WHERE key IS NOT NULL;
""",
    """
-- What is done outside: the intent is durable before it begins, the outcome is for good.
CREATE TABLE effect (
  born INTEGER PRIMARY KEY AUTOINCREMENT,  -- its id
  owner TEXT NOT NULL,                     -- slot
  kind TEXT NOT NULL CHECK (kind IN ('call', 'tool')),
  name TEXT NOT NULL,
  key TEXT NOT NULL,                       -- of a name; a tool call: message and call
  asker TEXT,                              -- run, turn or fiber whose code does it
  tool_call_id TEXT,
  digest TEXT NOT NULL,                    -- of the input
  preview TEXT,                            -- JSON; never the raw input
  policy TEXT NOT NULL CHECK (policy IN ('repeat', 'check', 'ask', 'fail')),
  attempt INTEGER NOT NULL CHECK (attempt > 0),
  status TEXT NOT NULL CHECK (status IN
    ('begun', 'asked', 'granted', 'completed', 'error', 'unknown')),
  result TEXT,                             -- JSON
  error TEXT,
  began_at INTEGER NOT NULL,               -- the last attempt
  settled_at INTEGER,
  UNIQUE (owner, kind, name, key),
  CHECK ((status IN ('completed', 'error', 'unknown')) = (settled_at IS NOT NULL))
) STRICT;
CREATE INDEX effect_open ON effect (owner, born) WHERE settled_at IS NULL;
CREATE INDEX effect_settled ON effect (owner, kind, settled_at)
  WHERE settled_at IS NOT NULL;
CREATE TRIGGER effect_absorbs BEFORE UPDATE ON effect
  WHEN OLD.status IN ('completed', 'error')
BEGIN SELECT RAISE(ABORT, 'an outcome is for good'); END;
-- what older turns have begun is in no ledger
INSERT INTO meta (key, value) SELECT 'effects_after', coalesce(max(id), 0) FROM job;
""",
    """
-- How often a turn was taken in all: what it says in between takes nothing back.
ALTER TABLE job ADD COLUMN tries INTEGER NOT NULL DEFAULT 0;
UPDATE job SET tries = attempts WHERE kind = 'turn';
""",
    """
-- run, turn or fiber of the owner whose code made a call; NULL: some other code of it
ALTER TABLE job ADD COLUMN maker TEXT;
""",
    f"""
-- What a run, or an own turn, and all below it may spend and have spent.
CREATE TABLE account (
  id INTEGER PRIMARY KEY AUTOINCREMENT,    -- above every account that it pays for
  slot TEXT NOT NULL,                      -- agent whose code spends
  what TEXT NOT NULL,                      -- id of its run or own turn
  parent INTEGER,                          -- account of whoever asked for it
  state TEXT NOT NULL CHECK (state IN ('open', 'ended', 'closed')),
  depth INTEGER,                           -- levels of runs that may be below it
  deadline_at INTEGER,
{_LINES}
  UNIQUE (slot, what)
) STRICT;
CREATE INDEX account_parent ON account (parent);
CREATE TRIGGER account_of_run AFTER DELETE ON run
BEGIN
  UPDATE account SET parent = (SELECT a.parent FROM account AS a
    WHERE a.slot = OLD.child AND a.what = OLD.id)
  WHERE parent = (SELECT a.id FROM account AS a
    WHERE a.slot = OLD.child AND a.what = OLD.id);
  DELETE FROM account WHERE slot = OLD.child AND what = OLD.id;
END;
CREATE TRIGGER account_of_turn AFTER DELETE ON fiber WHEN OLD.kind = 'turn'
BEGIN
  UPDATE account SET parent = (SELECT a.parent FROM account AS a
    WHERE a.slot = OLD.owner AND a.what = OLD.id)
  WHERE parent = (SELECT a.id FROM account AS a
    WHERE a.slot = OLD.owner AND a.what = OLD.id);
  DELETE FROM account WHERE slot = OLD.owner AND what = OLD.id;
END;
""",
    _PLACES,
    """
-- What parents say to runs that are at work; it goes with their end.
CREATE TABLE mail (
  n INTEGER PRIMARY KEY AUTOINCREMENT,     -- in the order of sending
  slot TEXT NOT NULL,                      -- agent whose run it is for
  run TEXT NOT NULL,
  id TEXT NOT NULL,
  body TEXT NOT NULL,                      -- JSON
  sent_at INTEGER NOT NULL,
  done_at INTEGER,                         -- its run needs it no more
  UNIQUE (slot, run, id)
) STRICT;
CREATE INDEX mail_waiting ON mail (slot, run, n) WHERE done_at IS NULL;
CREATE TRIGGER mail_of_ended AFTER UPDATE OF status ON run WHEN NEW.status <> 'running'
BEGIN DELETE FROM mail WHERE slot = NEW.child AND run = NEW.id; END;
CREATE TRIGGER mail_of_run AFTER DELETE ON run
BEGIN DELETE FROM mail WHERE slot = OLD.child AND run = OLD.id; END;
""",
    """
-- What clients are told instead of an error; NULL: they are told its text.
ALTER TABLE run ADD COLUMN error_id TEXT;
ALTER TABLE fiber ADD COLUMN error_id TEXT;
""",
)

AGENT: Final[tuple[str, ...]] = (
    """
CREATE TABLE culet_value (
  key TEXT PRIMARY KEY,                    -- 'state', and what chat bases keep
  value TEXT NOT NULL                      -- JSON
) STRICT, WITHOUT ROWID;

CREATE TABLE culet_entry (
  stream TEXT NOT NULL,                    -- run id, or request id of a chat turn
  i INTEGER NOT NULL,                      -- 0-based; frame i + 1 on the wire
  attempt INTEGER NOT NULL,
  body TEXT NOT NULL,                      -- JSON of one chunk
  PRIMARY KEY (stream, i)
) STRICT, WITHOUT ROWID;
CREATE TRIGGER culet_entry_keeps BEFORE UPDATE ON culet_entry
BEGIN SELECT RAISE(ABORT, 'a stored chunk is for good'); END;

CREATE TABLE culet_message (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  body TEXT NOT NULL                       -- JSON of one UI message
) STRICT;
""",
    """
-- where the batch of an entry lies in the order of the tree; NULL: at its run's start
ALTER TABLE culet_entry ADD COLUMN place INTEGER;
""",
)
