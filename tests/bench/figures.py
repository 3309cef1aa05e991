"""How a figure is printed: one JSON object on stdout, a line for people on stderr."""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

REPEATS: Final = int(os.environ.get("REPEATS", "5"))
clock = time.perf_counter


def put(name: str, unit: str, values: list[float], level: str | None) -> None:
    """Print the median of some repeats."""
    row = {
        "name": name,
        "value": float(f"{statistics.median(values):.5g}"),
        "unit": unit,
        "n": len(values),
        "level": level,
    }
    sys.stdout.write(msgspec.json.encode(row).decode() + "\n")
    sys.stdout.flush()
    low, high = min(values), max(values)
    told = f"{name:32} {row['value']:>12,.6g} {unit:8} [{low:,.5g} .. {high:,.5g}]"
    sys.stderr.write(f"{told} {level or ''}\n")


def rss_kb(pid: int | str = "self") -> int:
    """Return what a process holds in memory, in kB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])
