"""A small server with the inspector on, for everybody; prints its URL, then serves."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).parent.parent))

from culet.kernel import Request, open_kernel
from culet.web import create_app, serve
from web.inspected import Office, Slow, Stuck


async def anybody(request: Request) -> bool:
    return True


async def main() -> None:
    opener = open_kernel(
        roots=[Office], facets=[Slow, Stuck], idle_s=1.0, abort_grace_s=0.2
    )
    async with opener as kernel, trio.open_nursery() as nursery:
        app: Any = create_app(kernel, inspect=anybody)
        url = await nursery.start(partial(serve, app, bind="127.0.0.1:0"))
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()


trio.run(main)
