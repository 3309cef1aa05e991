"""To which names a server answers: against pages that bind their own name to it.

A page of evil.example may let its name point to 127.0.0.1 after it was loaded. Its
requests then have an `Origin` that equals their `Host`, so no rule of origins finds them,
and they reach what listens on the machine of who looks at the page. But they carry the
attacker's name. So whoever asks nobody who they are, and is reached over loopback, by
default answers to names only that no attacker can have.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

Hosts = str | tuple[str, ...] | None
_SPLIT: Final = re.compile(r"(\[[^\]]*\]|[^:]*)(:[0-9]*)?")


def is_rebound(host: str, server: str) -> bool:
    """Whether a `Host` may be an attacker's name for a server that is reached at `server`.

    Never away from loopback. There an address, `localhost` with what is below it, and
    names without a dot are ours.
    """
    try:
        if not ipaddress.ip_address(server).is_loopback:
            return False
    except ValueError:
        return False  # a socket of a file system, or nobody knows
    name = _name(host)
    if "." not in name or name.endswith(".localhost"):
        return name == "" and host != ""
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return True
    return False


def is_named(host: str, hosts: tuple[str, ...]) -> bool:
    """Whether a `Host` is one of those, each with a port or for all ports."""
    known = {wanted.lower() for wanted in hosts}
    return host.lower() in known or _name(host) in known


def _name(host: str) -> str:
    """Return the name in a `Host` without brackets and port; empty when it is none."""
    found = _SPLIT.fullmatch(host.lower())
    return "" if found is None else found[1]
