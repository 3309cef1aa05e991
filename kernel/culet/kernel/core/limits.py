"""Every bound in one place, so that nothing grows without a name.

Durations are seconds, sizes are bytes, unless the name says otherwise. Relations
between bounds are asserted when the module is imported.
"""

from __future__ import annotations

from typing import Final

import msgspec

DEPTH_MAX: Final = 4  # of a path, root included
FORWARDS_MAX: Final = 4  # of one request, from root to root
NAME_MAX: Final = 256  # code points of one agent name
KEY_MAX: Final = 1024  # code points of an idempotency key
SUBMISSIONS_PAGE: Final = 100  # of a chat, listed or forgotten at once
SUBMISSIONS_MAX: Final = 500  # when somebody asks for more
TAGS_MAX: Final = 9  # of a connection, besides its id
SHOWN_CHARS: Final = 500  # of a text of somebody's in a log
LOG_CHARS: Final = 8_000  # of a message
LOG_ERROR_CHARS: Final = 32_000  # of a traceback, its begin and end
REVOCATIONS_KEPT: Final = 1_000  # for requests that were on their way before them
TAG_MAX: Final = 256  # code points of one
CLOSE_REASON_BYTES: Final = 123  # of a close frame, which holds its code besides
CRON_YEARS: Final = 50  # how far a cron expression looks for its next fire
CRON_TEXT_MAX: Final = 256  # characters of a cron expression
DELAY_MAX_S: Final = 1e10  # of a schedule: some 300 years
INTERVAL_MAX_S: Final = 2_592_000  # 30 days; what is rarer is a cron
JITTER_MAX_S: Final = 86_400
AMOUNT_MAX: Final = 10**12  # of a budget or one spend: tokens, calls, cost in 1e-6 $
EFFECT_KEY_MAX: Final = 1024  # code points
ORDER_MAX: Final = 2**53 - 1  # of a display_order: what a browser counts exactly
ERROR_CHARS: Final = 2_000  # of an error text that is stored, or told to a model
# of models behind HTTP, which are made before any kernel is
MODEL_ATTEMPTS: Final = 4  # to get the first word of an answer
MODEL_WAIT_S: Final = 60.0  # between two of them, whatever a provider asks for
MODEL_CONNECT_S: Final = 10.0
MODEL_SILENCE_S: Final = 300.0  # between two signs of life in an answer
MODEL_EVENT_BYTES: Final = 8 << 20  # one event; all tool arguments of one answer
MODEL_TOKENS: Final = 8192  # of one answer, where a provider wants to be told
TERMINALS: Final = frozenset({"completed", "error", "aborted", "interrupted"})


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one kernel and its gateway; `Limits(open_databases=64)` changes one."""

    # storage
    open_databases: int = 512  # agent files open at once, over all trees
    open_asleep: int = 16  # of them, those that were read while their agent sleeps
    sql_rows: int = 10_000  # of one `sql()` result
    sql_steps: int = 50_000_000  # SQLite VM steps of one user statement
    sql_bytes: int = 1 << 20  # text of one statement
    value_bytes: int = 16 << 20  # one stored value or row
    database_pages: int = 1 << 20  # quota of one agent's file, pages of 1 KiB
    busy_s: float = 5.0  # of waiting for a file that another process has locked
    busy_step_s: float = 0.05  # between two looks at it
    linger_s: float = 0.005  # between a commit that nobody waits for and its barrier
    slice_s: float = 0.002  # of work in the loop before a checkpoint
    flush_s: float = 0.003  # of storing staged chunks per record
    segment_bytes: int = 4 << 20  # of the tree log
    checkpoint_frames: int = 1000  # of a WAL: then a checkpoint is wanted
    huge_frames: int = 3000  # of a WAL: never checkpointed in the loop
    checkpoint_s: float = 0.003  # of checkpoints in the loop after one record

    # jobs
    jobs_at_once: int = 256  # lanes at work, per tree; and taken behind their heads
    jobs_in_batch: int = 128  # of one lane, taken at once
    batch_s: float = 0.05  # of working on a batch; then its rest is given back
    crowd: int = 10  # calls of one method due at once: then there is a warning
    misfire_grace_s: float = 60.0  # late: then a tick with misfire="none" is skipped
    job_timeout_s: float = 600.0  # one callback or hook
    attempts: int = 5  # without progress
    tries: int = 25  # of one turn in all, however far each comes
    start_attempts: int = 3
    fiber_recovery_s: float = 86_400.0  # of age: then a hook that failed rests
    backoff_base_s: float = 1.0
    backoff_max_s: float = 300.0
    clock_check_s: float = 10.0
    waking_roots: int = 16  # opened at once after a restart

    # tree
    depth: int = DEPTH_MAX  # levels of a tree, root included; a URL carries no more
    children_per_agent: int = 100_000
    schedules_per_agent: int = 100_000  # queued calls and the dead among them
    schedules_at_once: int = 1_000  # stored by one `many`, in one step
    due_rows: int = 1_000  # of what is owed below an agent, or by a kernel, at once
    facets_per_tree: int = 200_000  # awake or not
    sockets_per_tree: int = 5_000
    tree_bytes: int = 16 << 30  # of all files of one tree, its log aside
    tree_rows: int = 1_000  # of `kernel.tree()` at once
    calls_at_once: int = 10_000  # external calls inside one tree
    failed_starts: int = 10_000  # agents whose failed starts are remembered, per tree
    restart_base_s: float = 0.2  # before the third try to start one, then doubling
    restart_max_s: float = 5.0
    restart_attempts: int = 10  # failures in a row, then it rests
    restart_rest_s: float = 60.0  # between two starts of an agent that rests
    restart_calm_s: float = 60.0  # a life that lasts so long makes up for them

    # runs and streams
    chunk_bytes: int = 1 << 20  # one stored chunk
    batch_chunks: int = 256  # of one run in one record
    staged_bytes: int = 1 << 20  # staged and not durable, per run: then its turn waits
    input_bytes: int = 8 << 20
    output_bytes: int = 8 << 20  # of a run or fiber, and of one stash, as JSON
    preview_bytes: int = 1024
    shown_bytes: int = 16 << 10  # of a preview, a display and a usage of a run, each
    reattach_s: float = 120.0  # without a word, of a waiter that joined a known run
    tool_output_bytes: int = 256 << 10  # of one tool call, as JSON
    summary_bytes: int = 256 << 10  # of a run; what is longer is cut
    progress_s: float = 0.2  # at most one stored progress frame in this time
    progress_bytes: int = 16 << 10  # one report, as JSON
    questions_shown: int = (
        16  # calls of a run and of all below it that one report names
    )
    questions_bytes: int = 12 << 10  # of their inputs in one report, as JSON
    mail_bytes: int = 16 << 10  # of one letter to a run, as JSON
    mail_waiting: int = 100  # letters to one run that it has not done
    mail_known: int = 1_000  # ids of letters of one run that stay known when done
    milestones: int = 1_000  # that one run reports
    runs_per_tree: int = 10_000  # that go on at once, over all agents of a tree
    many_retained: int = 1_000  # runs of one agent: then there is a warning
    many_detached: int = 50  # of one agent: then there is a warning
    retained_runs: int = 10_000  # of one agent: more are neither listed nor replayed
    sweep_runs: int = 256  # of one agent that are old: forgotten in one look
    replay_page_bytes: int = 64 << 10
    shared_pages_bytes: int = 8 << 20  # of replay, kept for the next who asks
    events_beat_s: float = 15  # of silence: then a reader of events hears a sign
    stall_s: float = 1.0  # of one pass of the loop: then the log says where it is
    pass_s: float = 0.01  # of starting and streaming, by all, in one pass of the loop
    feed_page: int = 512  # entries that a reader of a feed holds at once
    feed_bytes: int = 256 << 10  # of their bodies; one entry may have more
    feed_recent: int = 4_096  # batches whose streams are known without a look
    feed_gone: int = 10_000  # runs and agents of one tree that are told to be gone
    feed_readers: int = 256  # that wait for more of one tree
    wake_slice: int = 64  # waiters or outboxes served before a checkpoint
    hooks_at_once: int = 1_024  # of one agent
    notify_s: float = 30.0

    # effects
    effect_bytes: int = 256 << 10  # one recorded result, as JSON
    effect_error_chars: int = 2_000  # of the error of one
    effect_attempts: int = 5  # under `repeat`; then a person is asked
    effect_check_s: float = 60.0  # for a check; then a person is asked
    effects_open: int = 1_000  # of one agent without an outcome: more are refused
    effects_per_agent: int = 100_000  # recorded under keys of its own: more are refused
    effect_keep_s: float = (
        2_592_000.0  # 30 days after the outcome; then its key is free
    )
    effect_tools: int = 1_000  # settled tool calls of one agent that are still listed

    # children that run themselves
    adapter_call_s: float = 30.0  # one answer; the work goes on in the background
    adapter_poll_s: float = 0.05  # the first rest of a silent child, then doubling
    adapter_silence_s: float = 5.0  # of a tail, or between two looks: then a look
    cancel_s: float = 5.0  # to hear that a run was ended, before it is fenced

    # models
    model_tokens: int = 8192  # of an answer that its model does not bound: for budgets

    # web
    message_bytes: int = 1 << 20  # one incoming WebSocket message
    outbox_bytes: int = 4 << 20  # then a client is cut and comes back with its cursor
    write_bytes: int = 64 << 10  # to one client at once; one message may be more
    revoke_s: float = 0.5  # for a client to close when it may not any more
    slow_client_s: float = 20.0  # in which a client that is sent to takes nothing
    handshake_s: float = 10.0  # for a first request, and to answer a close
    idle_s: float = 75.0  # between two requests; of a silent socket, pinged or not
    ping_s: float = 25.0  # of silence, then a ping; so long again for the answer
    header_bytes: int = 32 << 10
    body_bytes: int = 16 << 20
    body_unread_bytes: int = 256 << 10  # of a body: then the client waits
    body_wait_s: float = 60.0  # for an agent to read on; then the rest is dropped
    body_pace: int = 1 << 10  # bytes a second, that a client sends of a body
    body_late_s: float = 60.0  # that it may be behind; then the rest is dropped
    connections: int = 10_000
    connections_per_address: int = 1_000
    rpc_per_connection: int = 1_024  # in flight
    messages_per_chat: int = 10_000
    transcript_bytes: int = 24 << 20  # of a chat, loaded for one turn
    transcript_least: int = 4  # messages that are loaded however large they are
    retained_turns: int = 100  # of a chat whose streams may still be replayed
    continuation_s: float = 0.1  # for a client that answered to ask what streams
    inspect_rows: int = 100  # of one answer of the inspector
    inspect_events: int = 500  # that a reader of it has not taken: then the oldest go
    inspect_readers: int = 16  # of its events at once
    inspect_body_bytes: int = 4 << 10  # of what it is asked to do

    # the Python client
    client_events: int = (
        1_024  # that one reader has not taken; then it is told `Lagged`
    )
    client_values: int = 1_024  # of one stream, not read: then the socket waits
    client_pause_s: float = 10.0  # how long it waits; then that stream is given up
    client_outbox: int = 1_024  # frames that are not sent yet
    client_message_bytes: int = 64 << 20  # one incoming message, a transcript included
    reconnect_base_s: float = 0.25
    reconnect_max_s: float = 10.0
    reconnect_calm_s: float = (
        5.0  # of a connection, after which the back-off begins anew
    )

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) <= 0:
                msg = f"limits.{name} must be positive, not {getattr(self, name)!r}"
                raise ValueError(msg)
        if self.depth > DEPTH_MAX:
            msg = f"limits.depth is at most {DEPTH_MAX}, not {self.depth}"
            raise ValueError(msg)


DEFAULT: Final = Limits()
assert DEFAULT.replay_page_bytes < DEFAULT.outbox_bytes
assert DEFAULT.chunk_bytes <= DEFAULT.staged_bytes
assert DEFAULT.message_bytes <= DEFAULT.body_bytes
assert DEFAULT.attempts <= DEFAULT.tries
