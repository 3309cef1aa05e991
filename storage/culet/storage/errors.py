"""What SQLite and the operating system raise, told in the words of the kernel.

This is the only place that knows both vocabularies. The original error stays
attached as the cause.
"""

from __future__ import annotations

import errno
from typing import Final

import apsw

from culet.kernel.errors import (
    SqlError,
    StorageBusy,
    StorageCorrupt,
    StorageError,
    StorageFull,
)

CAUGHT: Final = (apsw.Error, OSError, ValueError, TypeError, OverflowError)
"""What a statement or a file operation may raise; catch it, raise `storage_error`."""

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_BUSY: Final = (apsw.BusyError, apsw.LockedError)
_CORRUPT: Final = (apsw.CorruptError, apsw.NotADBError)
# The machine's or the file's fault, even in the middle of a user's statement.
_NOT_THE_USERS: Final = (
    apsw.FullError,
    apsw.IOError,
    apsw.CantOpenError,
    apsw.NoMemError,
    *_BUSY,
    *_CORRUPT,
    OSError,
)


def storage_error(error: BaseException) -> StorageError:
    """Return the error of the kernel that says what `error` says."""
    if isinstance(error, StorageError):
        return error
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, apsw.TooBigError):
        return StorageError("a value is too big (limits.value_bytes)")
    if isinstance(error, apsw.FullError):
        return StorageFull(text)
    if isinstance(error, _CORRUPT):
        return StorageCorrupt(text)
    if isinstance(error, _BUSY):
        return StorageBusy(text)
    if isinstance(error, OSError) and error.errno in _FULL:
        return StorageFull(text)
    return StorageError(text)


def user_error(error: BaseException, query: str) -> StorageError:
    """Return `SqlError` with the query, unless the user is not the one to blame."""
    if isinstance(error, _NOT_THE_USERS):
        return storage_error(error)
    if isinstance(error, apsw.InterruptError):
        return SqlError("took too many steps (limits.sql_steps)", query)
    if isinstance(error, apsw.TooBigError):
        return SqlError("a value is too big (limits.value_bytes)", query)
    return SqlError(str(error) or type(error).__name__, query)
