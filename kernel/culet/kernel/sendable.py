"""What can be sent to a client, said before it is sent: a message, a close, a tag.

What a transport cannot carry would fail there for every client, and tell none of those
who wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .core.limits import CLOSE_REASON_BYTES, TAG_MAX, TAGS_MAX
from .errors import UsageError
from .ports import Blob

# 1004, 1005 and 1006 are reserved, as is the rest below 3000
CLOSE_CODES: Final = frozenset(
    (*range(1000, 1004), *range(1007, 1015), *range(3000, 5000))
)


def message_blob(message: str | bytes) -> Blob:
    """Return a message of an agent as a blob; raises `UsageError` for what is none."""
    check_message(message)
    return Blob(message)


def check_message(message: str | bytes) -> None:
    """Raise `UsageError` for what no WebSocket carries."""
    if isinstance(message, str):
        if not message.isascii():
            try:
                message.encode()
            except UnicodeEncodeError:
                raise UsageError("a message must be valid Unicode") from None
    elif not isinstance(message, bytes):
        msg = f"a message is str or bytes, not {type(message).__name__}"
        raise UsageError(msg)


def close_reason(text: str) -> str:
    """Return what of a text fits into a close frame."""
    return text.encode(errors="replace")[:CLOSE_REASON_BYTES].decode(errors="ignore")


def close_words(code: int, reason: str) -> tuple[int, str]:
    """Return code and reason as a close frame carries them.

    Raises `UsageError` for a code that is reserved. In a transport it would end the
    connection without any code, and a client that was to stay away would come back.
    """
    if not isinstance(code, int) or code not in CLOSE_CODES:
        msg = f"a close frame carries 1000 to 1014 or 3000 to 4999, not {code!r:.40}"
        raise UsageError(msg)
    return int(code), close_reason(reason)


def check_tags(tags: Sequence[str]) -> Sequence[str]:
    """Return the tags of a connection; raises `UsageError` for what cannot be one."""
    if len(tags) > TAGS_MAX:
        msg = f"a connection has at most {TAGS_MAX} tags, not {len(tags)}"
        raise UsageError(msg)
    for tag in tags:
        if not isinstance(tag, str) or not 0 < len(tag) <= TAG_MAX:
            msg = f"a tag is a text of 1 to {TAG_MAX} letters, not {tag!r:.40}"
            raise UsageError(msg)
    return tags
