"""A chat over plain HTTP, as `useChat` of the AI SDK speaks it: POST, and events back.

`POST …/chat` asks and answers with the turn's chunks as server-sent events; `GET
…/chat/ID/stream` goes on with the turn that runs, from its first chunk, or says 204 (with
`?turn=` the one of that name, also when it has ended, while its chunks are kept); `POST
…/chat/ID/stop` stops it. Who leaves stops nothing: the turn goes on, and is there for
whoever comes back. ID is the client's name for the chat; the agent has one.

Source of the protocol: the AI SDK's `DefaultChatTransport` and UI message stream, v1.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final, final

import msgspec

from culet.kernel import Request, Response
from culet.kernel.bodies import Following
from culet.kernel.core.clientframes import ChatRequest, ui_messages
from culet.kernel.errors import CapacityError, Refused, UsageError
from culet.kernel.follow import follow
from culet.kernel.http import closed
from culet.kernel.state import READONLY

if TYPE_CHECKING:
    from culet.adapters.chat import Chat
    from culet.kernel.sockets import Connection
    from culet.kernel.streams import End

_HEADERS: Final = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-vercel-ai-ui-message-stream": "v1",
    "x-accel-buffering": "no",
}
_TRIGGERS: Final = ("submit-message", "regenerate-message")
_NOT_JSON: Final = "send application/json"
_BEAT: Final = b": it goes on\n\n"


@final
class EventView:
    """A turn as server-sent events, one chunk each."""

    def __init__(self) -> None:
        self.peers: dict[Connection, None] = {}
        self.quiet = False

    def started(self, *, replay: bool) -> list[str]:
        """Return nothing: the chunks speak for themselves."""
        return []

    def entry(self, _i: int, body: str, *, replay: bool) -> str:
        """Return one chunk; a body of several lines would be several events."""
        if "\n" in body or "\r" in body:
            body = msgspec.json.encode(msgspec.json.decode(body)).decode()
        return f"data: {body}\n\n"

    def joined(self, *, live: bool) -> list[str]:
        """Return nothing: the client needs no mark."""
        return []

    def ended(self, end: End, *, replay: bool) -> list[str]:
        """Return how it ended, where its chunks do not say it, and the mark of the end."""
        out: list[dict[str, Any]] = []
        if end.status in ("error", "interrupted"):
            out.append({"type": "error", "errorText": end.told})
        elif end.status == "aborted":
            out.append({"type": "abort"})
        events = [f"data: {msgspec.json.encode(chunk).decode()}\n\n" for chunk in out]
        return [*events, "data: [DONE]\n\n"]


async def answer(chat: Chat, request: Request) -> Response | None:
    """Answer a request of this protocol; None when it is none."""
    words = request.path.strip("/").split("/")
    match (request.method, words):
        case ("POST", [*_, "chat"]):
            _check_writer(request)
            return await _asked(chat, request)
        case ("GET", [*before, "stream"]) if _named(before):
            found = _wanted(chat, request.query.get("turn"))
            return Response(b"", 204) if found is None else _events(chat, found)
        case ("POST", [*before, "stop"]) if _named(before):
            _check_writer(request)
            return _stopped(chat, request)
        case _:
            return None


def _check_writer(request: Request) -> None:
    if request.readonly:
        raise Refused(READONLY)


def _stopped(chat: Chat, request: Request) -> Response:
    if not _is_json(request):
        return Response(_NOT_JSON, 415)
    for turn in chat.turns()[:1]:
        chat.cancel(turn)
    return Response(b"", 204)


def _named(words: list[str]) -> bool:
    """Whether these are `chat` and a name.

    Older clients write the name as it is, slashes and all; they take any other answer
    than 200 and 204 for an error.
    """
    return "chat" in words[:-1]


def _is_json(request: Request) -> bool:
    """Whether a request says that it is JSON.

    What changes something takes nothing else: a page of another origin cannot send that
    without asking first.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json"


def _wanted(chat: Chat, turn: str | None) -> str | None:
    """Return the turn that is asked for by name, while its chunks are kept; or what runs."""
    if turn is None:
        return chat.offers.to_resume()
    subject = chat.tree.endings.subject(chat.slot, turn)
    return None if subject is None or subject.kind not in ("turn", "run") else turn


async def _asked(chat: Chat, request: Request) -> Response:
    """Owe a turn and answer with its chunks.

    Raises `UsageError` for a body that is not of the protocol.
    """
    if not _is_json(request):
        return Response(_NOT_JSON, 415)
    body = await request.json(dict[str, Any])
    messages = ui_messages(body.pop("messages", None))
    trigger = body.pop("trigger", _TRIGGERS[0])
    if messages is None or trigger not in _TRIGGERS:
        msg = "a chat is asked with UI messages and a trigger that is known"
        raise UsageError(msg)
    for name in ("id", "messageId"):  # the client's own
        body.pop(name, None)
    asked = ChatRequest(
        id=chat.tree.kernel.chance.id(), messages=messages, trigger=trigger, body=body
    )
    try:
        chat.take(asked, request.identity)
    except CapacityError as error:
        return Response(str(error), 413)
    return _events(chat, asked.id)


def _events(chat: Chat, request_id: str) -> Response:
    parts = Following(_parts(chat, request_id))
    return Response(parts, 200, {**_HEADERS, "x-turn": request_id})


async def _parts(chat: Chat, request_id: str) -> AsyncIterator[bytes]:
    beat_s = chat.tree.kernel.limits.events_beat_s
    view = EventView()
    pages = follow(chat.tree, chat.slot, request_id, view, beat_s=beat_s)
    try:
        async for texts in pages:
            yield "".join(texts).encode() if texts else _BEAT
    finally:
        await closed(pages)
