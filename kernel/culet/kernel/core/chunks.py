"""From chunks to message parts: the fold that every viewer of a stream makes.

A stream says what happened (`text-delta`, `tool-output-available`, ...); a viewer
wants what there is to show: a list of parts. The rule is that of the clients' second
reducer (the one behind runs and observed tabs), because a stream must look the same
everywhere: ids of text parts are ignored, a delta goes to the last part of its type;
a tool part only ever moves forward; the first terminal state of its input or approval
stays; unknown chunks change nothing; nothing raises.

One rule differs in form only: text of `tool-input-delta` is not kept, since partial
JSON is no input and the whole input follows in `tool-input-available`.

The whole of it is two pure functions, *which part does this chunk touch* and *what
does that part become*. `apply_chunk_to_parts` uses them on a list, `fold` on an index
with its texts in pieces, so that a long stream is folded in linear time. Laws:
`fold(chunks)` equals applying them one by one; no input is ever changed; the same
list comes back where the rule says that nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import msgspec

Part = dict[str, Any]
Chunk = Mapping[str, Any]
_Sought = tuple[str, str]

_SETTLED: Final = frozenset({"output-available", "output-error", "output-denied"})
_DECIDED: Final = _SETTLED | {"approval-responded"}
_APPROVAL: Final = frozenset({"approval-requested", "approval-responded"})
_COPIED: Final = {
    "file": ("mediaType", "url"),
    "source-url": ("sourceId", "url", "title", "providerMetadata"),
    "source-document": (
        "sourceId", "mediaType", "title", "filename", "providerMetadata",
    ),
    "start-step": (),
    "step-start": (),
}  # fmt: skip


def apply_chunk_to_parts(parts: list[Part], chunk: Chunk) -> list[Part]:
    """Return the parts after `chunk`; the same list where the rule changes nothing.

    Parts and chunk are plain JSON values and stay as they are; the result shares
    whatever did not change. Never raises for a chunk of any shape.
    """
    kind = chunk.get("type")
    if not isinstance(kind, str):
        return parts
    at = _touched(parts, kind, chunk)
    old = None if at is None else parts[at]
    new = _become(old, kind, chunk)
    if new is old or new is None:
        return parts
    if at is None:
        return [*parts, new]
    return [*parts[:at], new, *parts[at + 1 :]]


def fold(chunks: Iterable[Chunk]) -> list[Part]:
    """Return the parts of a whole stream, in linear time."""
    building = _Building()
    for chunk in chunks:
        building.add(chunk)
    return building.finish()


def text_of(parts: Iterable[Part]) -> str:
    """Return the text that the parts show, without reasoning and tools."""
    texts = (part.get("text") for part in parts if part.get("type") == "text")
    return "".join(text for text in texts if isinstance(text, str))


class _Building:
    """The fold in progress. It owns its list; texts wait in pieces until they are read."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.last: dict[_Sought | None, int] = {}  # what is looked for -> position
        self.pieces: dict[int, list[str]] = {}

    def add(self, chunk: Chunk) -> None:
        kind = chunk.get("type")
        if not isinstance(kind, str):
            return
        at = self.last.get(_sought(kind, chunk))
        if at is not None and (
            kind == "text-delta"
            or (kind == "reasoning-delta" and chunk.get("providerMetadata") is None)
        ):
            self.pieces.setdefault(at, []).append(_delta(chunk))
            return
        old = None if at is None else self.whole(at)
        new = _become(old, kind, chunk)
        if new is old or new is None:
            return
        if at is None:
            self.note(new, len(self.parts))
            self.parts.append(new)
        else:
            self.parts[at] = new

    def note(self, part: Part, at: int) -> None:
        kind = part["type"]
        if kind in {"text", "reasoning"}:
            self.last["type", kind] = at
        elif "toolCallId" in part:
            self.last["toolCallId", part["toolCallId"]] = at
        elif isinstance(part.get("id"), str):
            self.last[kind, part["id"]] = at

    def whole(self, at: int) -> Part:
        pieces = self.pieces.pop(at, None)
        if pieces is not None:
            part = self.parts[at]
            self.parts[at] = {**part, "text": part["text"] + "".join(pieces)}
        return self.parts[at]

    def finish(self) -> list[Part]:
        for at in list(self.pieces):
            self.whole(at)
        return self.parts


def _sought(kind: str, chunk: Chunk) -> _Sought | None:
    """Say which part a chunk touches: the last of a type, or the one with an id.

    None: it adds a part, or touches none. Only texts are ids.
    """
    if kind in _TEXT:
        return None if kind.endswith("-start") else ("type", kind.partition("-")[0])
    if kind in _TOOL:
        call = chunk.get("toolCallId")
        return ("toolCallId", call) if isinstance(call, str) else None
    if kind.startswith("data-"):
        own = chunk.get("id")
        return (kind, own) if isinstance(own, str) else None
    return None


def _touched(parts: list[Part], kind: str, chunk: Chunk) -> int | None:
    """Find that part in a list, from its end, where it mostly is."""
    sought = _sought(kind, chunk)
    if sought is None:
        return None
    key, value = sought
    for at in range(len(parts) - 1, -1, -1):
        part = parts[at]
        if key.startswith("data-"):
            if part.get("type") == key and part.get("id") == value:
                return at
        elif part.get(key) == value:
            return at
    return None


def _become(part: Part | None, kind: str, chunk: Chunk) -> Part | None:
    """Return what the touched part becomes: itself, a new one, or None for nothing."""
    rule = _TEXT.get(kind) or _TOOL.get(kind)
    if rule is not None:
        return rule(part, chunk)
    if kind in _COPIED:
        made = {name: chunk[name] for name in _COPIED[kind] if name in chunk}
        return {"type": "step-start" if "step" in kind else kind, **made}
    if kind.startswith("data-"):
        return _data(part, kind, chunk)
    return None


def _delta(chunk: Chunk) -> str:
    delta = chunk.get("delta")
    return delta if isinstance(delta, str) else ""


def _with_metadata(part: Part, chunk: Chunk) -> Part:
    extra = chunk.get("providerMetadata")
    if not isinstance(extra, Mapping):
        return part
    old = part.get("providerMetadata")
    merged = {**old, **extra} if isinstance(old, Mapping) else dict(extra)
    return {**part, "providerMetadata": merged}


def _text_start(_part: Part | None, _chunk: Chunk) -> Part:
    return {"type": "text", "text": "", "state": "streaming"}


def _text_delta(part: Part | None, chunk: Chunk) -> Part:
    if part is None:
        return {"type": "text", "text": _delta(chunk), "state": "streaming"}
    return {**part, "text": part.get("text", "") + _delta(chunk)}


def _text_end(part: Part | None, _chunk: Chunk) -> Part | None:
    return {**part, "state": "done"} if part and part.get("state") != "done" else part


def _reasoning_start(_part: Part | None, _chunk: Chunk) -> Part:
    return {"type": "reasoning", "text": "", "state": "streaming"}


def _reasoning_delta(part: Part | None, chunk: Chunk) -> Part:
    if part is None:
        part = _reasoning_start(None, chunk)
    return _with_metadata({**part, "text": part.get("text", "") + _delta(chunk)}, chunk)


def _reasoning_end(part: Part | None, chunk: Chunk) -> Part | None:
    return _with_metadata({**part, "state": "done"}, chunk) if part else None


def tool_input(raw: object) -> dict[str, Any]:
    """Return a tool's input as the object that model providers insist on.

    A text that holds a JSON object is read; whatever else is no object becomes `{}`.
    """
    if isinstance(raw, Mapping):
        return dict(raw)
    if isinstance(raw, str) and raw.lstrip().startswith("{"):
        try:
            parsed = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return {}
        if isinstance(parsed, dict):
            return parsed
    return {}


def _call(chunk: Chunk) -> str | None:
    call = chunk.get("toolCallId")
    return call if isinstance(call, str) and call else None


def _new_tool(chunk: Chunk, state: str) -> Part:
    name = chunk.get("toolName")
    part: Part = {"type": f"tool-{name}", "toolCallId": _call(chunk)}
    return {**part, "toolName": name, "state": state}


def _called(part: Part, chunk: Chunk, *, title: bool = True) -> Part:
    """Copy what the provider said about the call, where it said something."""
    names = [("providerExecuted", "providerExecuted")]
    names.append(("providerMetadata", "callProviderMetadata"))
    if title:
        names.append(("title", "title"))
    said = {to: chunk[name] for name, to in names if chunk.get(name) is not None}
    return {**part, **said}


def _tool_start(part: Part | None, chunk: Chunk) -> Part | None:
    if part is not None or not _call(chunk):
        return part  # a provider that repeats old calls never means a new one
    return _called(_new_tool(chunk, "input-streaming"), chunk)


def _tool_delta(part: Part | None, chunk: Chunk) -> Part | None:
    if part and part.get("state") == "input-streaming" and "input" in chunk:
        return {**part, "input": chunk["input"]}
    return part


def _tool_available(part: Part | None, chunk: Chunk) -> Part | None:
    state = part.get("state") if part else None
    if part is None:
        if not _call(chunk):
            return None
        part = _new_tool(chunk, "input-available")
    elif state == "input-streaming":
        part = {**part, "state": "input-available"}
    elif state not in _APPROVAL or "input" in part:
        return part
    # A late input fills an approval's gap without touching its state or title.
    part = {**part, "input": tool_input(chunk.get("input"))}
    return _called(part, chunk, title=state not in _APPROVAL)


def _tool_input_error(part: Part | None, chunk: Chunk) -> Part | None:
    if part is None:
        if not _call(chunk):
            return None
        part = _new_tool(chunk, "output-error")
    elif part.get("state") in _SETTLED:
        return part
    part = {**part, "state": "output-error", "input": tool_input(chunk.get("input"))}
    return _called(_put(part, "errorText", chunk), chunk, title=False)


def _tool_approval(part: Part | None, chunk: Chunk) -> Part | None:
    if part is None or part.get("state") in _DECIDED:
        return part
    approval = {"id": chunk.get("approvalId")}
    if "approvalDescriptor" in chunk:
        approval["descriptor"] = chunk["approvalDescriptor"]
    return {**part, "state": "approval-requested", "approval": approval}


def _tool_denied(part: Part | None, _chunk: Chunk) -> Part | None:
    if part is None or part.get("state") in _DECIDED:
        return part
    return {**part, "state": "output-denied"}


def _tool_output(part: Part | None, chunk: Chunk) -> Part | None:
    if part is None:
        return None
    part = _put({**part, "state": "output-available"}, "output", chunk)
    return _put(part, "preliminary", chunk) if "preliminary" in chunk else part


def _tool_error(part: Part | None, chunk: Chunk) -> Part | None:
    if part is None:
        return None
    return _put({**part, "state": "output-error"}, "errorText", chunk)


def _put(part: Part, name: str, chunk: Chunk) -> Part:
    """Set a key to what the chunk says, or drop it: absent is not null."""
    if name in chunk:
        return {**part, name: chunk[name]}
    return {key: value for key, value in part.items() if key != name}


def _data(part: Part | None, kind: str, chunk: Chunk) -> Part | None:
    if chunk.get("transient"):
        return part
    if part is None:
        part = {"type": kind}
        if chunk.get("id") is not None:
            part["id"] = chunk["id"]
    return _put(part, "data", chunk)


_Rule = Callable[[Part | None, Chunk], Part | None]
_TEXT: Final[dict[str, _Rule]] = {
    "text-start": _text_start,
    "text-delta": _text_delta,
    "text-end": _text_end,
    "reasoning-start": _reasoning_start,
    "reasoning-delta": _reasoning_delta,
    "reasoning-end": _reasoning_end,
}
_TOOL: Final[dict[str, _Rule]] = {
    "tool-input-start": _tool_start,
    "tool-input-delta": _tool_delta,
    "tool-input-available": _tool_available,
    "tool-input-error": _tool_input_error,
    "tool-approval-request": _tool_approval,
    "tool-output-denied": _tool_denied,
    "tool-output-available": _tool_output,
    "tool-output-error": _tool_error,
}
