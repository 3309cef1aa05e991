"""What Python's collector of cycles may cost a server: a full look stops the loop.

It goes over every object that is alive, 60 ms of CPU after the imports and 50 us more for
each open socket, whenever a quarter more of them has come: with 2,000 sockets nobody is
served for 170 ms. So what was imported is set aside, and full looks get rare: a server
leaves few cycles behind, and none when a socket ends.
"""

from __future__ import annotations

import gc
from typing import Final

USUAL: Final = (700, 10, 10)  # thresholds up to Python 3.12; others were chosen
RARE: Final = (700, 10, 100)

_settled = False


def settle() -> None:
    """Set aside what lives by now. Does something once in a process."""
    global _settled
    if _settled:
        return
    _settled = True
    gc.freeze()
    if gc.get_threshold() == USUAL:
        gc.set_threshold(*RARE)
