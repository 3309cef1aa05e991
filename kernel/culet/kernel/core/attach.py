"""What a client that comes back says it has of an agent's runs, in its address.

`_runs=[["r1",1700000000000,12],…]`: of the run r1, asked for at that instant, it has all
frames up to number 12. The instant tells one life of an id from the next: a run that was
cleared and asked for again begins anew. It saves sending what is known; whoever says
nothing, or something else, gets everything.

Laws: `known_runs` never raises, and reads back what `known_text` wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

PARAMETER: Final = "_runs"
KNOWN_MAX: Final = 64  # runs that one address tells of, the newest
KNOWN_CHARS: Final = 4096  # of its text: addresses have to pass through proxies


class Known(NamedTuple):
    """One run as a client has it: when it was asked for (epoch ms), the last frame."""

    started_at: int
    sequence: int


_decoder: Final = msgspec.json.Decoder(list[tuple[str, int, int]])


def known_runs(text: str | None) -> dict[str, Known]:
    """Return what a client says it has; nothing when it says no such thing."""
    if text is None or len(text) > KNOWN_CHARS:
        return {}
    try:
        said = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {}
    if len(said) > KNOWN_MAX:
        return {}
    return {run_id: Known(at, seq) for run_id, at, seq in said if seq >= 0}


def known_text(known: Mapping[str, Known]) -> str:
    """Return the parameter for the newest of these; "" when there are none."""
    said: list[tuple[str, int, int]] = []
    size = 2
    for run_id, (started_at, sequence) in reversed(list(known.items())[-KNOWN_MAX:]):
        entry = (run_id, started_at, sequence)
        size += len(msgspec.json.encode(entry)) + 1
        if size > KNOWN_CHARS:
            break
        said.append(entry)
    return msgspec.json.encode(said).decode() if said else ""


def noted(known: dict[str, Known], frame: Mapping[str, object]) -> None:
    """Note one frame of a run that came: in place, and only what follows on."""
    event, number = frame.get("event"), frame.get("sequence")
    if not isinstance(event, Mapping):
        return
    if event.get("kind") == "cleared":
        gone = event.get("runIds")
        for run_id in gone if isinstance(gone, list) else ():
            if isinstance(run_id, str):
                known.pop(run_id, None)
        return
    run_id, at = event.get("runId"), frame.get("startedAt")
    if not isinstance(run_id, str):
        return
    had = known.get(run_id)
    if event.get("kind") == "started":
        if type(at) is int and (had is None or had.started_at != at):
            known.pop(run_id, None)
            known[run_id] = Known(at, 0)
            while len(known) > KNOWN_MAX:
                del known[next(iter(known))]
    elif had is not None and type(number) is int and number == had.sequence + 1:
        known[run_id] = had._replace(sequence=number)
