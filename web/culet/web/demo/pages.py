"""The demo's page: a handful of static files, read once, served from memory."""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from quart import Response
from quart_trio import QuartTrio

TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def read_static() -> dict[str, tuple[bytes, str]]:
    """Return the page's files by name: (content, content type).

    `culet/NAME` are the modules of the npm package, of which the page is made.
    """
    static = files("culet.web.demo").joinpath("static")
    found = {}
    for folder, prefix in ((static, ""), (static.joinpath("culet"), "culet/")):
        for entry in folder.iterdir():
            kind = TYPES.get("." + entry.name.rpartition(".")[2])
            if kind is not None:
                found[prefix + entry.name] = entry.read_bytes(), kind
    return found


def add_pages(app: QuartTrio) -> None:
    """Serve `/` and `/static/NAME` from `app`."""
    found = read_static()

    def page(name: str) -> Response:
        if name not in found:
            return Response("Not Found", 404)
        body, kind = found[name]
        headers = {"content-type": kind, "cache-control": "no-cache"}
        headers["x-content-type-options"] = "nosniff"
        return Response(body, 200, headers)

    async def index() -> Response:
        return page("index.html")

    async def static_file(name: str) -> Response:
        return page(name)

    app.add_url_rule("/", "demo_index", index)
    app.add_url_rule("/static/<path:name>", "demo_static", static_file)
