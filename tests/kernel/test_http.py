"""Requests and responses by themselves: a body is read once, and never without bound."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from culet.kernel import Request, Response
from culet.kernel.errors import CapacityError, UsageError
from culet.kernel.http import as_request

CLOSED: list[str] = []


async def parts() -> AsyncIterator[bytes]:
    try:
        for part in (b"one ", b"two ", b"three"):
            yield part
    finally:
        CLOSED.append("closed")


@pytest.fixture(autouse=True)
def none_closed() -> None:
    CLOSED.clear()


def streamed(url: str = "/x") -> Request:
    return Request("post", url, body=parts)


async def test_a_streamed_body_is_read_once_and_then_known() -> None:
    request = streamed()
    assert await request.read() == b"one two three"
    assert await request.read() == b"one two three"
    assert [part async for part in request.stream()] == [b"one two three"]
    assert CLOSED == ["closed"]


async def test_what_streams_can_be_had_once() -> None:
    request = streamed()
    assert [part async for part in request.stream()] == [b"one ", b"two ", b"three"]
    with pytest.raises(UsageError, match="read already"):
        await request.read()


async def test_who_stops_reading_ends_what_feeds_it() -> None:
    stream = streamed().stream()
    assert await anext(stream) == b"one "
    await stream.aclose()
    assert CLOSED == ["closed"]


@pytest.mark.parametrize("body", [b"one two three", parts], ids=["bytes", "parts"])
async def test_a_body_that_is_too_large_is_not_taken(body: object) -> None:
    request = Request("POST", "/x", body=body)  # type: ignore[arg-type]
    with pytest.raises(CapacityError, match="larger than 12 bytes"):
        await request.read(max_bytes=12)
    assert len(CLOSED) == callable(body)
    other = Request("POST", "/x", body=body)  # type: ignore[arg-type]
    assert len(await other.read(max_bytes=13)) == 13


async def test_a_body_that_was_read_has_a_bound_at_the_next_reading_too() -> None:
    request = streamed()
    await request.read()
    with pytest.raises(CapacityError):
        await request.read(max_bytes=12)


class Point(msgspec.Struct):
    x: int


async def test_json_is_decoded_to_the_type_that_is_asked_for() -> None:
    assert await as_request("/x", body=b'{"x": 1}').json(Point) == Point(1)
    assert await as_request("/x", body=b"[1, null]").json() == [1, None]


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"x": "1"}', b"\xff", b"[" * 100_000], ids=range(5)
)
async def test_what_is_not_the_json_that_is_wanted_is_a_usage_error(
    body: bytes,
) -> None:
    with pytest.raises(UsageError, match="not what is wanted"):
        await as_request("/x", body=body).json(Point)


async def test_a_copy_shares_a_body_that_still_comes() -> None:
    request = streamed("/a/b?q=1&q=2&empty=")
    copy = request.replace(path="/b", headers={"X-Who": "me"}, identity=7)
    assert (copy.method, copy.path, copy.identity) == ("POST", "/b", 7)
    assert copy.headers == {"x-who": "me"}
    assert copy.query == {"q": "2", "empty": ""}
    assert request.headers == {}
    assert await copy.read() == b"one two three"
    with pytest.raises(UsageError):
        await request.read()
    assert await copy.replace().read() == b"one two three"


def test_a_request_at_a_hop_asks_for_what_is_left() -> None:
    request = Request("GET", "/a/b%2Fc?q=1")
    assert request.raw_path == "/a/b%2Fc"
    rest = request.at("/b%2Fc")
    assert (rest.url, rest.path, rest.query) == ("/b%2Fc?q=1", "/b%2Fc", {"q": "1"})
    assert Request("GET", "/a").at("/").url == "/"


def test_headers_have_small_letters_however_they_are_given() -> None:
    pairs = [("X-One", "1"), ("x-two", "2")]
    for headers in (pairs, dict(pairs)):
        assert as_request("/x", headers=headers).headers == {"x-one": "1", "x-two": "2"}
        assert Response(b"", 200, headers).headers == {"x-one": "1", "x-two": "2"}
    known = as_request("/x")
    assert as_request(known) is known


def test_a_response_says_what_its_body_is() -> None:
    assert Response("é").body == "é".encode()
    assert Response("é").headers == {"content-type": "text/plain; charset=utf-8"}
    own = {"Content-Type": "text/html"}
    assert Response("é", headers=own).headers == {"content-type": "text/html"}
    assert Response(b"raw").headers == {}
    made = Response.json({"a": [1]}, 201)
    assert (made.body, made.status) == (b'{"a":[1]}', 201)
    assert made.headers == {"content-type": "application/json"}
