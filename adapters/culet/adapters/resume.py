"""The resume handshake: what a client that connects or asks is offered.

Every probe gets one answer: `resuming` when a turn streams, `pending` when one is owed
that has said nothing, `none` otherwise. A client that was offered a stream hears nothing
of it until it acknowledges; then it gets all of it from the first chunk on. That holds
for one that has acknowledged before, too: the published client may take up the offer
that it did not ask for, then ask, and build the message anew from the answer on. What
came between that answer and a new replay would be the middle of a text without its start.

A continuation is never offered: it is shown as far as it is, and heard live from there,
because clients build a resumed stream as a message of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import msgspec
import trio

from culet.kernel.core import frames
from culet.kernel.errors import StorageError
from culet.kernel.ports import Blob
from culet.kernel.sockets import Connection
from culet.kernel.streams import Cursor, TurnView

if TYPE_CHECKING:
    from culet.adapters.chat import Chat


@final
class Offers:
    """Who was offered which turn, in this life of the agent."""

    def __init__(self, chat: Chat) -> None:
        self.chat = chat
        self._waiting: dict[str, dict[Connection, None]] = {}  # told `pending`
        self._expected: dict[str, tuple[Connection, trio.Event]] = {}

    def hello(self, connection: Connection) -> list[str]:
        """Return what a client that connects is told: a turn to wait for, the transcript.

        With the transcript goes the offer of the last turn, if it has failed.
        """
        active = self._active()
        told: list[str] = []
        if active is None or not self._said(active):
            # Whoever read the history before the question has it now, in its place. Of a
            # turn that speaks the client may hold more than is stored: it keeps its list.
            told = [frames.chat_messages(self.chat.transcript.texts(), connect=True)]
        if active is not None:
            offer = self._offer(active, connection)
            return [*told, *offer, *self._recovering(active)]
        failed = self.chat.transcript.failed
        return told if failed is None else [*told, frames.stream_resuming(failed)]

    def _offer(self, active: str, connection: Connection) -> list[str]:
        said = self._said(active)
        view = self.chat.view(active)
        if view is not None and view.continuation:
            return []  # it is shown to who asks
        if said:
            return [frames.stream_resuming(active)]
        self._waiting.setdefault(active, {})[connection] = None
        return [frames.stream_pending(active)]

    def _recovering(self, active: str) -> list[str]:
        """Return that a turn which was cut is about to be taken up, if so."""
        chat = self.chat
        if (chat.slot, active) in chat.tree.turns.live or not chat.begun(active):
            return []
        return [frames.chat_recovering(True, active)] if self._keep(active) else []

    def _keep(self, request_id: str) -> bool:
        """Keep that clients are told of a recovery; what cannot be kept cannot be taken back."""
        chat = self.chat
        try:
            if chat.transcript.recovering != request_id:
                chat.transcript.set_recovering(request_id)
                chat.tree.touched()
        except StorageError:
            return False
        return True

    def given_up(self, request_id: str) -> None:
        """An attempt at a turn is over, the turn is not: everybody hears that it is cut."""
        if self.chat.transcript.recovering != request_id and self._keep(request_id):
            blob = Blob(frames.chat_recovering(True, request_id))
            self.chat.tree.sockets.push_all(self.chat.slot, blob)

    def recovered(self, request_id: str) -> None:
        """A turn goes on, or has ended: whoever was told that it is recovering hears so."""
        chat = self.chat
        if chat.transcript.recovering == request_id:
            chat.transcript.set_recovering(None)
            chat.tree.touched()
            blob = Blob(frames.chat_recovering(False, request_id))
            chat.tree.sockets.push_all(chat.slot, blob)

    def expect(self, request_id: str, connection: Connection) -> None:
        """A client's answer has begun a continuation: it will ask what streams."""
        self._expected[request_id] = connection, trio.Event()

    async def arrived(self, request_id: str) -> None:
        """Wait, not for long, until that client has asked.

        Clients of either generation lose the start of a continuation that comes before.
        """
        expected = self._expected.get(request_id)
        if expected is not None:
            with trio.move_on_after(self.chat.tree.kernel.limits.continuation_s):
                await expected[1].wait()

    def probe(self, probe_id: str | None, connection: Connection) -> None:
        """Answer one resume request: exactly one of resuming, pending, none."""
        for expected, event in self._expected.values():
            if expected is connection:
                event.set()
        active = self._active()
        if active is None:
            failed = self.chat.transcript.failed
            connection.say(
                frames.stream_none("idle", probe_id)
                if failed is None
                else frames.stream_resuming(failed, probe_id)
            )
            return
        said = self._said(active)
        view = self.chat.view(active)
        if view is not None and view.continuation:
            self._show_continuation(active, view, probe_id, connection)
        elif said:
            if view is not None:
                view.peers.pop(connection, None)  # nothing of it until it acknowledges
            connection.unfollow(active, "turn")
            connection.say(frames.stream_resuming(active, probe_id))
        else:
            self._waiting.setdefault(active, {})[connection] = None
            connection.say(frames.stream_pending(active, probe_id))

    def _show_continuation(
        self,
        request_id: str,
        view: TurnView,
        probe_id: str | None,
        connection: Connection,
    ) -> None:
        """A continuation is never offered: the message so far, then live frames."""
        message = self.chat.shown(request_id)
        if message is not None and self._said(request_id):
            body = msgspec.json.encode(message).decode()
            connection.say(frames.message_updated(body))
        connection.say(frames.stream_none(None, probe_id))
        view.peers[connection] = None

    def acknowledge(self, request_id: str, connection: Connection) -> None:
        """Replay a turn to a client, then live frames; a finished one ends with its end.

        Whichever was offered: it may have ended, and another begun, since then.
        """
        subject = self.chat.tree.endings.subject(self.chat.slot, request_id)
        if subject is None or subject.kind not in ("turn", "run"):
            return
        self.replay(request_id, connection)

    def to_resume(self) -> str | None:
        """Return the turn whose events somebody may go on with who has no socket.

        A continuation is none: its chunks alone are half a message.
        """
        active = self._active()
        if active is not None:
            view = self.chat.view(active)
            return None if view is not None and view.continuation else active
        return self.chat.transcript.failed

    def replay(self, request_id: str, connection: Connection) -> None:
        """Let a client have a turn from its first chunk on, then live."""
        if connection.replays(request_id, "turn"):
            return
        view = self.chat.view(request_id)
        if view is not None:
            view.peers.pop(connection, None)
        connection.follow(Cursor(self.chat.slot, request_id, "turn"))

    def _active(self) -> str | None:
        """Return the turn that runs, or the one that comes first."""
        turns = self.chat.turns()
        return turns[0] if turns else None

    def _said(self, request_id: str) -> bool:
        stream = self.chat.tree.streams.open(self.chat.slot, request_id)
        return stream.committed + len(stream.staged) > 0

    def announce(self, request_id: str, *, first: bool) -> None:
        """A turn speaks: who was told `pending` is offered the stream.

        With its `first` chunk everybody else hears it from here on: also who came when
        it was queued behind another turn, and was offered that one.
        """
        view = self.chat.view(request_id)
        waiting = self._waiting.pop(request_id, {})
        if view is not None and first:
            for connection in self.chat.tree.sockets.protocol_of(self.chat.slot):
                view.peers[connection] = None
        for connection in waiting:
            if connection is self.chat.origins.get(request_id):
                continue  # it hears its own request from the first chunk on
            if view is not None:
                view.peers.pop(connection, None)
            connection.say(frames.stream_resuming(request_id))

    def leave(self, connection: Connection) -> None:
        """A client is gone; it may come back, again and again, while a turn goes on."""
        for peers in self._waiting.values():
            peers.pop(connection, None)

    def over(self, request_id: str) -> None:
        """A turn ended: who still waited for its first chunk is told that there is none."""
        self._expected.pop(request_id, None)
        for connection in self._waiting.pop(request_id, ()):
            connection.say(frames.stream_none())
