"""HTTP on agents' paths and beside them."""

from __future__ import annotations

import pytest
import trio

from culet.kernel import Limits, open_kernel
from culet.kernel.errors import UsageError
from culet.web import create_app, install, serve
from culet.web.app import gateways_of
from culet.web.serve import split_bind
from web.serving import Hub, Plain, serving

pytestmark = pytest.mark.usefixtures("transport")


async def test_probes() -> None:
    async with serving() as server:
        assert (await server.http("GET", "/healthz"))[::2] == (200, b"ok\n")
        assert (await server.http("GET", "/readyz"))[0] == 200
        await server.http("GET", "/agents/hub/h")
        status, _, body = await server.http("GET", "/metrics")
        assert status == 200
        assert b"culet_trees 1.0\n" in body


async def test_bodies_go_in_and_come_out() -> None:
    async with serving() as server:
        answer = await server.http("POST", "/agents/hub/h/echo", body=b"\0hello" * 999)
        assert (answer[0], answer[2]) == (200, b"\0hello" * 999)
        answer = await server.http("GET", "/agents/hub/h/stream")
        assert (answer[0], answer[2]) == (200, b"one two three")
        assert answer[1]["content-type"] == "text/plain"


@pytest.mark.limit("body_bytes")
async def test_a_body_that_is_too_large_is_413() -> None:
    limits = Limits(body_bytes=2000, message_bytes=1000)
    async with serving(limits=limits) as server:
        path = "/agents/hub/h/echo"
        assert (await server.http("POST", path, body=b"x" * 2000))[0] == 200
        assert (await server.http("POST", path, body=b"x" * 2001))[0] == 413


@pytest.mark.rule("W-021")
async def test_head_has_the_headers_and_no_body() -> None:
    async with serving() as server:
        status, headers, body = await server.http("HEAD", "/agents/hub/h")
        assert (status, headers["content-length"], body) == (404, "15", b"")


@pytest.mark.rule("F-465", "W-024")
async def test_a_failing_handler_is_500_with_an_error_id(caplog) -> None:
    async with serving() as server:
        status, _, body = await server.http("GET", "/agents/hub/h/fail")
        assert status == 500
        assert b"(error " in body
        assert b"secret" not in body
    assert "secret-token-9" in caplog.text


@pytest.mark.rule("W-010")
async def test_what_is_not_ours_falls_through_to_the_app() -> None:
    async with serving() as server:
        for path in ("/other", "/agents", "/agentsx/hub/h"):
            assert (await server.http("GET", path))[0] == 404
        assert (await server.http("GET", "/agents/hub"))[0] == 404


@pytest.mark.rule("W-025", "W-027")
async def test_foreign_pages_may_not_post_unless_cors_says_so() -> None:
    origin = ("Origin: https://b.example",)
    async with serving() as server:
        status, headers, _ = await server.http("GET", "/agents/hub/h", headers=origin)
        assert status == 403
        assert "access-control-allow-origin" not in headers
    async with serving(cors=True) as server:
        status, headers, _ = await server.http("GET", "/agents/hub/h", headers=origin)
        assert (status, headers["access-control-allow-origin"]) == (404, "*")
        status, headers, body = await server.http(
            "OPTIONS", "/agents/hub/h", headers=origin
        )
        assert (status, body) == (200, b"")
        assert headers["access-control-max-age"] == "86400"
    async with serving(cors={"Access-Control-Allow-Origin": "https://b.example"}) as s:
        _, headers, _ = await s.http("GET", "/agents/nope/x", headers=origin)
        assert headers["access-control-allow-origin"] == "https://b.example"


async def test_an_opener_is_entered_while_the_app_serves() -> None:
    def opener():
        return open_kernel(roots=[Hub], facets=[Plain], storage="memory:")

    app = create_app(opener)
    assert not gateways_of(app)[0].ready
    async with trio.open_nursery() as nursery:
        url = await nursery.start(lambda *, task_status: serve(
            app, bind="127.0.0.1:0", task_status=task_status))  # fmt: skip
        assert url.startswith("http://127.0.0.1:")
        assert gateways_of(app)[0].ready
        nursery.cancel_scope.cancel()


async def test_agents_are_installed_once() -> None:
    async with open_kernel(roots=[Hub], facets=[Plain]) as kernel:
        app = create_app(kernel)
        with pytest.raises(UsageError, match="already"):
            install(app, kernel)


async def test_a_taken_port_is_named() -> None:
    async with serving() as server:
        app = create_app(server.kernel)
        with pytest.raises(UsageError, match="--port"):
            await serve(app, bind=f"127.0.0.1:{server.port}")


@pytest.mark.parametrize("bind", ["8787", "a:b", "a:", "a:70000", "a:²"])
def test_a_bind_that_is_none_is_refused(bind: str) -> None:
    with pytest.raises(UsageError, match="bind"):
        split_bind(bind)


def test_binds() -> None:
    assert split_bind("[::1]:0") == ("::1", 0)
    assert split_bind("localhost:80") == ("localhost", 80)
