"""The inspector: nothing for strangers, bounded pages, verbs that only our page can use."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import trio

from culet.kernel import Kernel, Limits, Request, Response, open_kernel
from culet.kernel.errors import UsageError
from culet.kernel.events import Failure
from culet.web import create_app
from culet.web.app import INSPECTOR, gateways_of
from culet.web.inspect import Inspector, read_static
from culet.web.inspect.api import error_class
from culet.web.inspect.events import Hub, Ring, told
from web.inspected import SECRET, Office, Slow, Stuck
from web.serving import RUNNERS, Server, read_all

SERVER = Path(__file__).parents[1] / "js" / "inspect-server.py"
OPERATOR = ("Cookie: who=operator",)
OFFICE = "class=Office&name=o"
LISTS = ("roots", "tree", "runs", "due", "fibers", "effects", "dead")


async def authenticate(request: Request) -> Any:
    who = request.headers.get("cookie", "").removeprefix("who=")
    return Response("log in first", 401) if who == "nobody" else who or None


async def operators(request: Request) -> bool:
    return bool(request.identity == "operator")


class Desk:
    """A server with an inspector and an agent at work, and what is asked of it."""

    def __init__(self, server: Server, app: Any) -> None:
        self.server, self.app = server, app

    @property
    def inspector(self) -> Inspector:
        found: Inspector = self.app.extensions[INSPECTOR]
        return found

    async def office(self) -> Any:
        return await self.server.kernel.get_agent(Office, "o")

    async def get(self, name: str, query: str = OFFICE) -> Any:
        path = f"/inspect/api/{name}?{query}"
        status, _headers, body = await self.server.http("GET", path, headers=OPERATOR)
        assert status == 200, body
        return json.loads(body)

    async def post(self, body: Any, *headers: str) -> tuple[int, bytes]:
        given = headers or (
            "Content-Type: application/json",
            f"Origin: {self.server.url}",
            "Sec-Fetch-Site: same-origin",
        )
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, _headers, answer = await self.server.http(
            "POST", "/inspect/api/act", headers=(*OPERATOR, *given), body=text
        )
        return status, answer

    async def act(self, verb: str, job: Any) -> Any:
        status, body = await self.post(
            {"root": ["Office", "o"], "act": verb, "id": int(job)}
        )
        assert status == 200, body
        return json.loads(body)


async def until(look: Callable[[], Any]) -> Any:
    with trio.fail_after(10):
        while not (found := await look()):
            await trio.sleep(0.02)
    return found


@asynccontextmanager
async def desk(
    transport: str, limits: Limits | None = None, idle_s: float = 60.0, **options: Any
) -> AsyncIterator[Desk]:
    async with (
        open_kernel(
            roots=[Office],
            facets=[Slow, Stuck],
            limits=limits,
            idle_s=idle_s,
            abort_grace_s=0.2,
        ) as kernel,
        trio.open_nursery() as nursery,
    ):
        options = {"authenticate": authenticate, "inspect": operators, **options}
        app = create_app(kernel, **options)
        url = await nursery.start(RUNNERS[transport], app)
        yield Desk(Server(url, kernel), app)
        nursery.cancel_scope.cancel()


PATHS = (
    "/inspect", "/inspect/", "/inspect/main.js", "/inspect/api/roots",
    f"/inspect/api/tree?{OFFICE}", "/inspect/api/events", "/inspect/none",
)  # fmt: skip


async def test_it_is_off_unless_it_is_enabled(transport: str) -> None:
    async with desk(transport, inspect=None) as seen:
        for path in PATHS:
            found = await seen.server.http("GET", path, headers=OPERATOR)
            nowhere = await seen.server.http("GET", "/nowhere", headers=OPERATOR)
            assert (found[0], found[2]) == (404, nowhere[2]), path


@pytest.mark.parametrize("who", ["guest", "nobody", ""])
async def test_a_stranger_finds_what_is_where_nothing_is(
    transport: str, who: str
) -> None:
    headers = (f"Cookie: who={who}",) if who else ()
    async with desk(transport) as seen:
        nowhere = await seen.server.http("GET", "/nowhere", headers=headers)
        for path in PATHS:
            found = await seen.server.http("GET", path, headers=headers)
            assert found[0] == 404, path
            assert found[2] == nowhere[2], path
            dates = {"date": ""}
            assert found[1] | dates == nowhere[1] | dates, path
        sent = (*headers, "Content-Type: application/json")
        for path in ("/inspect/api/act", "/nowhere"):
            answer = await seen.server.http("POST", path, headers=sent, body=b"{}")
            assert answer[0] == 404, path


async def test_who_may_look_can_answer_and_what_it_raises_is_a_no(
    transport: str,
) -> None:
    async def login(request: Request) -> Response:
        return Response(b"", 303, {"location": "/login"})

    async def broken(request: Request) -> bool:
        raise ValueError(SECRET)

    async with desk(transport, inspect=login) as seen:
        status, headers, _ = await seen.server.http("GET", "/inspect")
        assert (status, headers["location"]) == (303, "/login")
    async with desk(transport, inspect=broken) as seen:
        status, _, body = await seen.server.http("GET", "/inspect")
        assert status == 404
        assert SECRET.encode() not in body


async def test_the_page_is_served_strictly(transport: str) -> None:
    async with desk(transport) as seen:
        for name, (content, kind) in read_static().items():
            path = "/inspect" if name == "index.html" else f"/inspect/{name}"
            status, headers, body = await seen.server.http(
                "GET", path, headers=OPERATOR
            )
            assert (status, headers["content-type"], body) == (200, kind, content)
            assert headers["content-security-policy"].startswith("default-src 'none'")
            assert "unsafe" not in headers["content-security-policy"]
            assert headers["cache-control"] == "no-store"
            if name != "culet.svg":
                assert b"http:" not in content
                assert b"https:" not in content
                assert b"innerHTML" not in content
        status, headers, _ = await seen.server.http(
            "GET", "/inspect/", headers=OPERATOR
        )
        assert (status, headers["location"]) == (308, "../inspect")


async def test_every_list_shows_what_there_is_and_no_secret(transport: str) -> None:
    async with desk(transport) as seen:
        office = await seen.office()
        await office.begin("r1", 10_000)
        await office.weave(2)
        ring, report, breaks = await office.plan()
        dead = await until(lambda: rows(seen, "dead"))

        assert [(d["id"], d["error"], d["what"]) for d in dead] == [
            (breaks, "ValueError", "breaks")
        ]
        roots = await seen.get("roots", "")
        assert [(r["class"], r["name"], r["state"]) for r in roots["rows"]] == [
            ("Office", "o", "open")
        ]
        tree = await rows(seen, "tree")
        assert [r["path"] for r in tree] == ["Office/o", "Office/o/Slow/r1"]
        due = {r["id"]: r for r in await rows(seen, "due")}
        assert (due[ring]["why"], due[ring]["callback"]) == ("time", "ring")
        assert (due[report]["kind"], due[report]["rule"]) == ("cron", "0 7 * * *")
        [run] = await rows(seen, "runs")
        await office.begin("r2", 2)
        await office.begin("r3", -1)

        async def ends() -> Any:
            found = {r["run_id"]: r["status"] for r in await rows(seen, "runs")}
            return found == {"r1": "running", "r2": "completed", "r3": "error"}

        await until(ends)
        assert (run["run_id"], run["status"], run["phase"]) == (
            "r1",
            "running",
            "running",
        )
        assert json.loads(run["preview"]).keys() == {"words", "text"}
        later = await until(lambda: grown(seen, run["chunks"]))
        assert later["elapsed_s"] > run["elapsed_s"]
        assert {f["name"] for f in await rows(seen, "fibers")} == {"f0", "f1"}
        for name in LISTS:
            assert SECRET not in json.dumps(await seen.get(name)), name


async def rows(seen: Desk, name: str) -> Any:
    return (await seen.get(name))["rows"]


async def grown(seen: Desk, chunks: int) -> Any:
    run = (await rows(seen, "runs"))[-1]
    return run if run["chunks"] > chunks else None


async def test_a_run_is_cancelled_by_its_number_once(transport: str) -> None:
    async with desk(transport) as seen:
        await (await seen.office()).begin("r1", 10_000)
        [run] = await rows(seen, "runs")
        first = await seen.act("cancel_run", run["number"])
        again = await seen.act("cancel_run", run["number"])
        none = await seen.act("cancel_run", 12_345)

        assert (first["done"], first["status"]) == (True, "aborted")
        assert (again["done"], again["status"]) == (False, "aborted")
        assert none == {"done": False}
        [run] = await rows(seen, "runs")
        assert (run["status"], run["phase"]) == ("aborted", "over")
        assert run["cause"] == "cancelled"


async def test_schedules_are_run_now_paused_replayed_and_cancelled(
    transport: str,
) -> None:
    async with desk(transport) as seen:
        office = await seen.office()
        ring, report, breaks = await office.plan()
        await until(lambda: rows(seen, "dead"))

        async def is_called() -> bool:
            return bool(await office.called())

        assert (await seen.act("run_now", ring))["done"]
        await until(is_called)
        assert not (await seen.act("run_now", ring))["done"]  # it is over
        assert (await seen.act("pause", report))["done"]
        [row] = [r for r in await rows(seen, "due") if r["id"] == report]
        assert row["why"] == "paused"
        assert "resume" in row["acts"]
        assert (await seen.act("resume", report))["done"]
        assert (await seen.act("cancel", report))["done"]
        assert [r for r in await rows(seen, "due") if r["id"] == report] == []
        assert not (await seen.act("redeliver", breaks))["done"]  # a call is no letter
        assert (await seen.act("replay", breaks))["done"]
        await until(lambda: rows(seen, "dead"))  # it has failed again
        assert (await seen.act("cancel", breaks))["done"]
        assert await rows(seen, "dead") == []


async def test_what_an_agent_would_not_hear_is_told_again() -> None:
    limits = Limits(attempts=1, backoff_base_s=0.01)
    async with desk("own", limits) as seen:
        await (await seen.office()).begin("unheard", 1)
        [letter] = await until(lambda: rows(seen, "dead"))
        assert (letter["kind"], letter["error"]) == ("hook", "ValueError")
        assert letter["acts"] == ["redeliver"]
        assert not (await seen.act("cancel", letter["id"]))["done"]
        assert (await seen.act("redeliver", letter["id"]))["done"]
        await until(lambda: rows(seen, "dead"))  # it is as deaf as it was


async def test_a_root_that_sleeps_is_shown_and_may_be_called() -> None:
    async with desk("own", idle_s=0.05) as seen:
        office = await seen.office()
        ring, *_ = await office.plan()

        async def asleep() -> bool:
            roots = await rows(seen, "roots")
            return [r["state"] for r in roots] == ["sleeping"]

        await until(asleep)
        for name in ("tree", "runs", "fibers", "dead", "effects"):
            assert await rows(seen, name) == []
            assert await asleep(), name
        assert ring in [r["id"] for r in await rows(seen, "due")]
        assert (await seen.act("run_now", ring))["done"]

        async def is_called() -> bool:
            return bool(await office.called())

        await until(is_called)


async def test_code_that_did_not_stop_is_shown_as_a_remnant() -> None:
    async with desk("own") as seen:
        office = await seen.office()
        await office.cling()
        tree = await rows(seen, "tree")
        assert [(r["path"], r["state"]) for r in tree] == [
            ("Office/o", "live"),
            ("Office/o/Stuck/s", "sleeping"),
            ("Office/o/Stuck/s", "remnant"),
        ]
        assert (await seen.get("roots", ""))["counts"]["remnants"] == 1
        await office.release()


async def test_a_root_that_sleeps_and_owes_nothing_is_listed_and_opened_if_asked() -> (
    None
):
    async with desk("own", idle_s=0.05) as seen:
        await (await seen.office()).begin("r1", 0)

        async def asleep() -> bool:
            roots = await rows(seen, "roots")
            return [r["state"] for r in roots] == ["sleeping"]

        await until(asleep)
        for name in ("tree", "runs", "fibers", "dead", "effects"):
            assert (await seen.get(name))["asleep"], name
            assert await asleep(), name
        shown = await seen.get("runs", f"{OFFICE}&open=1")
        assert [r["run_id"] for r in shown["rows"]] == ["r1"]
        assert "asleep" not in shown
        tree = await seen.get("tree", f"{OFFICE}&open=1")
        assert [r["path"] for r in tree["rows"]] == ["Office/o", "Office/o/Slow/r1"]
        assert {r["state"] for r in tree["rows"]} == {"sleeping"}, "nobody was woken"
        for find, count in (("office/O", 1), ("nobody", 0)):
            assert len((await seen.get("roots", f"find={find}"))["rows"]) == count


JSON = "Content-Type: application/json"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param((JSON, "Origin: https://evil.example"), 403, id="origin"),
        pytest.param((JSON, "Origin: null"), 403, id="opaque"),
        pytest.param((JSON, "Sec-Fetch-Site: cross-site"), 403, id="site"),
        pytest.param((JSON, "Sec-Fetch-Site: same-site"), 403, id="neighbour"),
        pytest.param(("Content-Type: text/plain",), 415, id="form-text"),
        pytest.param(
            ("Content-Type: application/x-www-form-urlencoded",), 415, id="form"
        ),
        pytest.param(("X-Nothing: 1",), 415, id="none"),
    ],
)
async def test_no_page_of_another_site_can_act(
    headers: tuple[str, ...], status: int
) -> None:
    async with desk("own") as seen:
        await (await seen.office()).begin("r1", 10_000)
        [run] = await rows(seen, "runs")
        wanted = {"root": ["Office", "o"], "act": "cancel_run", "id": run["number"]}
        assert (await seen.post(wanted, *headers))[0] == status
        assert [r["status"] for r in await rows(seen, "runs")] == ["running"]


async def test_sites_may_not_act_where_any_origin_may_come_in() -> None:
    async with desk("own", origins="*", cors=True) as seen:
        wanted = {"root": ["Office", "o"], "act": "cancel", "id": 1}
        evil = ("Origin: https://evil.example", "Sec-Fetch-Site: cross-site")
        assert (await seen.post(wanted, JSON, *evil))[0] == 403
        preflight = await seen.server.http(
            "OPTIONS", "/inspect/api/act", headers=(*OPERATOR, *evil)
        )
        assert "access-control-allow-origin" not in preflight[1]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(b"", 400, id="empty"),
        pytest.param(b"{", 400, id="cut"),
        pytest.param(b'{"root":["Office","o"],"act":"drop","id":1}', 400, id="verb"),
        pytest.param(b'{"root":["Office"],"act":"cancel","id":1}', 400, id="root"),
        pytest.param(
            b'{"root":["Office","o"],"act":"cancel","id":1,"x":1}', 400, id="more"
        ),
        pytest.param(
            b'{"root":["Office","no"],"act":"cancel","id":1}', 404, id="nobody"
        ),
        pytest.param(b'{"root":["None","o"],"act":"cancel","id":1}', 404, id="class"),
        pytest.param(b" " * 5000, 503, id="large"),
    ],
)
async def test_other_bodies_are_refused_and_make_no_root(
    body: bytes, status: int
) -> None:
    async with desk("own") as seen:
        await (await seen.office()).called()
        assert (await seen.post(body))[0] == status
        roots = await seen.get("roots", "")
        assert [r["name"] for r in roots["rows"]] == ["o"]


@pytest.mark.limit("inspect_rows")
async def test_pages_are_bounded_and_go_on() -> None:
    limits = Limits(inspect_rows=3)
    async with desk("own", limits) as seen:
        office = await seen.office()
        for i in range(7):
            await office.begin(f"r{i}", 0)
        await office.weave(5)
        for name, count in (("tree", 8), ("runs", 7), ("fibers", 5)):
            found: list[Any] = []
            after = ""
            while after is not None and len(found) <= count:
                page = await seen.get(name, f"{OFFICE}&limit=1000&after={quote(after)}")
                assert len(page["rows"]) <= 3
                found += [r.get("id", r["path"]) for r in page["rows"]]
                after = page["after"]
            assert len(found) == len(set(found)) == count, name
        assert (await seen.get("roots", "limit=1"))["after"] is None


async def test_bad_questions_are_refused_and_wake_nobody() -> None:
    async with desk("own") as seen:
        for query in ("", "class=Office", f"{OFFICE}&after=x", f"{OFFICE}&limit=-1"):
            path = f"/inspect/api/runs?{query}"
            answer = await seen.server.http("GET", path, headers=OPERATOR)
            assert answer[0] == 400, query
        for name in LISTS:
            assert (await seen.get(name))["rows"] == []
        assert seen.server.kernel.trees == {}


async def test_events_come_without_texts_and_a_reader_that_leaves_is_gone(
    transport: str,
) -> None:
    async with desk(transport) as seen:
        stream = await trio.open_tcp_stream("127.0.0.1", seen.server.port)
        lines = ("GET /inspect/api/events HTTP/1.1", "Host: x", *OPERATOR, "", "")
        await stream.send_all("\r\n".join(lines).encode())
        await until(lambda: looks(seen.inspector))
        office = await seen.office()
        await office.begin("r1", 3)
        await office.plan()
        heard = b""
        with trio.fail_after(10):
            while b"schedule:error" not in heard or b'"to":"completed"' not in heard:
                heard += await stream.receive_some(65536)
        await trio.aclose_forcefully(stream)

        assert b"text/event-stream" in heard
        assert b'"channel":"run:transition"' in heard
        assert b'"path":"Office/o' in heard
        assert SECRET.encode() not in heard

        async def gone() -> bool:
            await office.called()
            return seen.inspector.readers == 0

        await until(gone)


async def looks(inspector: Inspector) -> int:
    return inspector.readers


@pytest.mark.limit("inspect_events")
def test_a_reader_that_does_not_take_keeps_the_newest_events() -> None:
    ring = Ring(3)
    for line in (b"1", b"2", b"3"):
        ring.put(line)
    assert (ring.lost, ring.take()) == (0, b"data: 1\n\ndata: 2\n\ndata: 3\n\n")
    for line in (b"4", b"5", b"6", b"7"):
        ring.put(line)
    assert ring.lost == 1
    assert ring.take().startswith(b"event: lost\ndata: 1\n\ndata: 5\n\n")
    assert ring.lost == 0


@pytest.mark.limit("inspect_events")
async def test_the_ring_of_a_reader_has_inspect_events() -> None:
    async with desk("own", Limits(inspect_events=7)) as seen:
        ring = seen.inspector._hubs[0]._join()
        assert ring._lines.maxlen == 7
        seen.inspector._hubs[0]._leave(ring)


@pytest.mark.limit("inspect_body_bytes")
async def test_what_the_inspector_is_asked_has_inspect_body_bytes() -> None:
    asked = json.dumps({"root": ["Office", "o"], "act": "retry", "id": 99}).encode()
    async with desk("own", Limits(inspect_body_bytes=200)) as seen:
        await seen.office()
        fits = await seen.post(asked.ljust(200))
        assert fits[0] != 413
        assert (await seen.post(asked.ljust(199)))[0] == fits[0]
        assert (await seen.post(asked.ljust(201)))[0] not in (fits[0], 500)


@pytest.mark.limit("inspect_readers")
async def test_only_so_many_read_the_events() -> None:
    async with desk("own", Limits(inspect_readers=1)) as seen:
        stream = await trio.open_tcp_stream("127.0.0.1", seen.server.port)
        lines = ("GET /inspect/api/events HTTP/1.1", "Host: x", *OPERATOR, "", "")
        await stream.send_all("\r\n".join(lines).encode())
        await until(lambda: looks(seen.inspector))
        answer = await seen.server.http("GET", "/inspect/api/events", headers=OPERATOR)
        assert answer[0] == 503
        await trio.aclose_forcefully(stream)


async def test_the_events_end_with_their_kernel() -> None:
    async with open_kernel(roots=[Office], facets=[Slow]) as kernel:
        app = create_app(kernel, inspect=anybody)
        async with trio.open_nursery() as nursery:
            url = await nursery.start(RUNNERS["own"], app)
            seen = Desk(Server(url, kernel), app)
            stream = await trio.open_tcp_stream("127.0.0.1", seen.server.port)
            lines = ("GET /inspect/api/events HTTP/1.1", "Host: x", "Connection: close")
            await stream.send_all("\r\n".join([*lines, "", ""]).encode())
            await until(lambda: looks(seen.inspector))
            gateways_of(app)[0].serve(None)
            assert b": open" in await read_all(stream)
            nursery.cancel_scope.cancel()


async def test_a_server_that_stops_ends_the_events_in_order() -> None:
    command = [sys.executable, str(SERVER)]
    async with trio.open_nursery() as nursery:
        process = await nursery.start(
            partial(
                trio.run_process, command, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, check=False,
            )
        )  # fmt: skip
        assert process.stdout is not None
        with trio.fail_after(30):
            url = (await process.stdout.receive_some()).decode().strip()
        stream = await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2]))
        await stream.send_all(b"GET /inspect/api/events HTTP/1.1\r\nHost: x\r\n\r\n")
        heard = b""
        with trio.fail_after(10):
            while b": open" not in heard:
                heard += await stream.receive_some(65536)
            process.terminate()
            while part := await stream.receive_some(65536):
                heard += part
        assert heard.endswith(b"0\r\n\r\n")  # said, not cut
        await stream.aclose()


async def anybody(request: Request) -> bool:
    return True


def test_a_slow_reader_loses_the_oldest_and_is_told_how_many() -> None:
    ring = Ring(3)
    for i in range(5):
        ring.put(b"%d" % i)

    assert ring.take() == (b"event: lost\ndata: 2\n\ndata: 2\n\ndata: 3\n\ndata: 4\n\n")
    assert ring.take() == b""


async def test_who_listens_no_more_costs_the_kernel_nothing() -> None:
    async with open_kernel(
        roots=[Office], facets=[Slow], limits=Limits(inspect_readers=1)
    ) as kernel:
        hub = Hub(kernel)
        assert not kernel.heard
        async with aclosing(hub.stream()) as first:
            assert await anext(first) == b": open\n\n"
            assert kernel.heard
            with trio.fail_after(5):
                assert [part async for part in hub.stream()] == []  # one looks on
        assert not kernel.heard


def test_what_is_not_listed_is_not_told() -> None:
    assert told(1, "abort", None, ["s"], SECRET) == {"at": 1, "channel": "abort"}
    assert told(1, "rpc", None, "s", {"method": SECRET}) == {"at": 1, "channel": "rpc"}
    odd: Any = {"text": SECRET}
    failed = Failure("e1", odd, SECRET, ValueError(SECRET))
    assert told(1, "failure", None, None, failed) == {
        "at": 1, "channel": "failure", "error_id": "e1"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param(None, None, id="none"),
        pytest.param(f"ValueError: {SECRET}", "ValueError", id="class"),
        pytest.param(f"ValueError('{SECRET}')", "ValueError", id="repr"),
        pytest.param(f"{SECRET} is wrong", "error", id="text"),
        pytest.param("", "error", id="empty"),
    ],
)
def test_of_an_error_its_class_is_shown(text: str | None, shown: str | None) -> None:
    assert error_class(text) == shown


def test_one_inspector_of_an_app_and_none_under_agents() -> None:
    async def opener() -> Kernel:
        raise AssertionError

    with pytest.raises(UsageError, match="installed under"):
        create_app(opener, prefix="inspect", inspect=operators)  # type: ignore[arg-type]
