"""Who may come in, in which order it is asked, and what is told of a refusal."""

from __future__ import annotations

import pytest

from culet.kernel import Request, Response
from culet.kernel.errors import Refused, UsageError
from culet.web.gateway import Gateway, close_code
from web.serving import serving

pytestmark = pytest.mark.usefixtures("transport")

NAME_256 = "n" * 256

REFUSED = [
    # path, HTTP status, close code
    ("/agents/nope/x", 400, 4400),
    ("/agents/plain/x", 404, 4404),  # a class that only lives under a parent
    ("/agents/hub/sub", 400, 4400),
    ("/agents/hub/a%00b", 400, 4400),
    ("/agents/hub/%2e%2e", 400, 4400),
    ("/agents/hub/" + NAME_256 + "n", 400, 4400),
    ("/agents/hub/h/sub/nope/x", 404, 4404),
    ("/agents/hub/h/sub/plain", 404, 4404),
    ("/agents/hub/h/sub/plain/a%00b", 400, 4400),
    ("/agents/hub/h/sub/plain/%zz", 400, 4400),
    ("/agents/hub/h/sub/plain/absent/sub/plain/x", 404, 4404),
    ("/agents/hub/h" + "/sub/plain/x" * 4, 400, 4400),
]


@pytest.mark.rule("I-22", "W-005", "W-007")
@pytest.mark.parametrize(("path", "status", "code"), REFUSED)
async def test_what_cannot_be_named_is_refused_and_writes_nothing(
    path: str, status: int, code: int
) -> None:
    async with serving() as server:
        assert (await server.http("GET", path))[0] == status
        assert await server.close_of(path) == code
        nodes = server.kernel.tree("Hub", "h")

        assert not any("Plain" in row["path"] for row in nodes)
        # only a path whose root can be named may open one, and only its last step make it
        assert not any(key.name != "h" for key in server.kernel.trees)


@pytest.mark.rule("W-023", "W-018")
async def test_an_absent_root_before_a_hop_is_not_made() -> None:
    async with serving() as server:
        path = "/agents/hub/nobody/sub/plain/x"

        assert (await server.http("GET", path))[0] == 404
        assert await server.close_of(path) == 4404
        assert server.kernel.trees == {}


@pytest.mark.rule("W-018")
async def test_a_guessed_run_is_not_found_and_starts_nothing() -> None:
    async with serving() as server, server.connect() as hub:
        await hub.hello()
        path = "/agents/hub/h/sub/writer/guessed"
        before = server.kernel.metrics()["commits"]

        assert await server.close_of(path) == 4404
        assert (await server.http("GET", path))[0] == 404
        assert server.kernel.metrics()["commits"] == before
        assert [row["path"] for row in server.kernel.tree("Hub", "h")] == ["Hub/h"]


@pytest.mark.rule("W-018")
async def test_a_run_that_exists_admits_to_its_child() -> None:
    async with serving() as server, server.connect() as hub:
        assert (await hub.call("write", "known", 1))["result"] == "completed"

        async with server.connect("/agents/hub/h/sub/writer/known") as child:
            assert (await child.call("whoami"))["result"] == ["h", "known"]
            assert (await child.call("nothing"))["success"] is False


@pytest.mark.rule("W-004", "W-049")
@pytest.mark.parametrize(
    ("raw", "name"),
    [("a%2Fb", "a/b"), ("a%20b", "a b"), ("sub", "sub"), ("%E2%98%83", "☃")],
)
async def test_an_encoded_name_stays_one_name(raw: str, name: str) -> None:
    async with serving() as server:
        path = f"/agents/hub/h/sub/plain/{raw}"
        async with server.connect() as hub:
            await hub.call("make", name)
        async with server.connect(path) as client:
            me = (await client.hello())[0]
            assert (me["name"], me["agent"]) == (name, "plain")

        status, _, body = await server.http("GET", f"{path}/tail%2Fx?a=1")
        assert (status, body.decode()) == (200, f"{name}|/tail%2Fx|{{'a': '1'}}")


@pytest.mark.rule("W-007")
async def test_four_levels_are_the_most() -> None:
    async with serving() as server:
        async with server.connect() as hub:
            await hub.call("make", "a")
        path = "/agents/hub/h/sub/plain/a"
        for name in ("b", "c"):
            path += f"/sub/plain/{name}"
            async with server.connect(path) as client:
                names = (await client.call("whoami"))["result"]
        assert names == ["h", "a", "b", "c"]
        assert await server.close_of(path + "/sub/plain/d") == 4400


@pytest.mark.rule("I-42", "W-034")
async def test_the_order_is_origin_authenticate_admit() -> None:
    asked: list[str] = []

    async def authenticate(request: Request) -> object:
        asked.append("authenticate")
        return Response("who?", 401) if "no" in request.query else {"user": "ann"}

    async def admit(request: Request, root: object) -> Response | None:
        asked.append(f"admit {request.identity}")
        return Response("not you", 403) if "deny" in request.query else None

    async with serving(authenticate=authenticate, admit=admit) as server:
        foreign = [("Origin", "https://evil.example")]
        steps: list[tuple[str, tuple[int, list[str]]]] = [
            ("/agents/nope/x", (400, [])),
            ("/agents/hub/h?no=1", (401, ["authenticate"])),
            ("/agents/hub/h?deny=1", (403, ["authenticate", "admit {'user': 'ann'}"])),
            ("/agents/hub/h", (404, ["authenticate", "admit {'user': 'ann'}"])),
        ]
        for path, (status, order) in steps:
            asked.clear()
            assert (await server.http("GET", path))[0] == status, path
            assert asked == order, path
            if status != 404:
                assert await server.close_of(path) == 4000 + status
        asked.clear()
        assert await server.refused("/agents/hub/h", foreign) == 403
        assert asked == []
    assert len(server.kernel.trees) == 0


@pytest.mark.rule("F-44", "F-54", "W-024", "W-030")
@pytest.mark.parametrize("kind", [ValueError, SystemExit])
@pytest.mark.parametrize("where", ["authenticate", "admit"])
async def test_a_failing_gate_refuses_and_does_not_say_why(
    where: str, kind: type[BaseException]
) -> None:
    async def fail(*_: object) -> None:
        raise kind("secret-token-9")

    options = {where: fail}
    async with serving(**options) as server:
        status, _, body = await server.http("GET", "/agents/hub/h")
        assert status == 500
        assert b"secret" not in body
        assert b"error" in body
        async with server.connect() as client:
            code, reason = await client.closed()
            assert code == 1011
            assert "secret" not in reason


@pytest.mark.rule("W-023", "W-030")
async def test_a_gate_that_raises_refused_has_its_status() -> None:
    async def authenticate(request: Request) -> None:
        raise Refused("pay first", status=402)

    async with serving(authenticate=authenticate) as server:
        assert (await server.http("GET", "/agents/hub/h"))[0] == 402
        assert await server.close_of("/agents/hub/h") == 4402


ORIGINS = [
    # origins, Origin, Host, allowed
    (None, None, "a.example", True),
    (None, "https://a.example", "a.example", True),
    (None, "https://A.example:443", "a.example", True),
    (None, "http://a.example:8787", "a.example:8787", True),
    (None, "http://a.example:8788", "a.example:8787", False),
    (None, "https://b.example", "a.example", False),
    (None, "https://a.example.b.example", "a.example", False),
    (None, "null", "a.example", False),
    (None, "file://a.example", "a.example", False),
    (None, "http://[", "a.example", False),
    (None, "https://a.example", "", False),
    ("*", "https://b.example", "a.example", True),
    (("https://b.example",), "https://b.example", "a.example", True),
    (("https://b.example",), "https://a.example", "a.example", False),
]


@pytest.mark.rule("F-47", "W-025")
@pytest.mark.parametrize(("origins", "origin", "host", "allowed"), ORIGINS)
def test_origins(origins, origin, host, allowed) -> None:
    headers = {"host": host} | ({} if origin is None else {"origin": origin})

    assert Gateway(None, origins=origins).allows(headers) is allowed


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="origins"):
        Gateway(None, origins="https://a.example")
    with pytest.raises(UsageError, match="prefix"):
        Gateway(None, prefix="../x")
    with pytest.raises(UsageError, match="not open"):
        _ = Gateway(None).kernel


@pytest.mark.rule("W-030")
@pytest.mark.parametrize(
    ("status", "code"),
    [(400, 4400), (404, 4404), (499, 4499), (500, 1011), (302, 1011)],
)
def test_close_codes(status: int, code: int) -> None:
    assert close_code(status) == code


@pytest.mark.rule("W-015")
async def test_the_other_transport_is_refused_in_http() -> None:
    async with serving() as server:
        path = "/agents/hub/h?__agents_transport="
        assert await server.refused(path + "capnweb") == 400
        assert await server.refused(path + "cf-websocket") == 101


@pytest.mark.rule("W-001")
async def test_a_prefix_may_have_several_segments() -> None:
    async with serving(prefix="api/v1/agents") as server:
        async with server.connect("/api/v1/agents/hub/h") as client:
            assert (await client.hello())[0]["name"] == "h"
        assert await server.refused("/agents/hub/h") == 404


@pytest.mark.rule("W-023")
async def test_a_reason_that_authenticate_gives_is_told() -> None:
    async def authenticate(request: Request) -> str:
        raise Refused("come back on Monday", status=403)

    async with serving(authenticate=authenticate) as server:
        status, _, body = await server.http("GET", "/agents/hub/h")
        assert (status, body) == (403, b"come back on Monday")
        assert await server.close_of("/agents/hub/h") == 4403
