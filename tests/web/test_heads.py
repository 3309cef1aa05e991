"""What the server behind the listener gets to see of a client's bytes."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.web.heads import POISON, Head, Sieve, read_head, refuse_handshake

BYTES = 2000
GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /a HTTP/1.1\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
UPGRADE = (
    b"GET /a HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def sieved(*parts: bytes) -> bytes:
    sieve = Sieve(BYTES)
    return b"".join(map(sieve.feed, parts))


FINE = {
    "get": GET,
    "two": GET + GET,
    "a body": POST + b"Content-Length: 4\r\n\r\nbody" + GET,
    "chunks": CHUNKED
    + b"4\r\nbody\r\n1f;ext=1\r\n"
    + b"x" * 31
    + b"\r\n0\r\n\r\n"
    + GET,
    "chunks of empty lines": CHUNKED + b"6\r\n\r\n\n\n\r\r\r\n0\r\n\r\n" + GET,
    "a body of heads": POST + b"Content-Length: 28\r\n\r\n" + GET + GET,
    "an empty value": b"GET /a HTTP/1.1\r\nHost: x\r\nX:\r\nY: \t a b \t\r\n\r\n",
    "bytes in a value": b"GET /a HTTP/1.1\r\nHost: x\r\nX: \xe9\r\n\r\n",
    "an address": b"GET /a HTTP/1.1\r\nHost: [::1]:80\r\n\r\n",
    "options": b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    "a query": b"GET /a?b=http://c/%zz HTTP/1.1\r\nHost: x\r\n\r\n",
    "old": b"GET /a HTTP/1.0\r\n\r\n",
}


@pytest.mark.parametrize("data", FINE.values(), ids=FINE)
def test_what_has_one_reading_passes_as_it_came(data: bytes) -> None:
    assert sieved(data) == data
    assert sieved(*(data[i : i + 1] for i in range(len(data)))) == data


def request(line: bytes = b"GET /a HTTP/1.1", *fields: bytes) -> bytes:
    return b"\r\n".join([line, *(fields or (b"Host: x",)), b"", b""])


REFUSED = {
    # line ends
    "bare line feeds": GET.replace(b"\r", b""),
    "a bare line feed in a head": GET.replace(b"Host", b"X: y\nHost"),
    "a bare line feed at the end": b"GET /a HTTP/1.1\r\nHost: x\r\n\n",
    "a bare return": GET.replace(b"Host", b"X: y\rHost"),
    "an empty line before": b"\r\n" + GET,
    "a folded line": request(b"GET /a HTTP/1.1", b"Host: x", b"X: a", b" b"),
    "a line folded by a tab": request(b"GET /a HTTP/1.1", b"Host: x", b"\tb"),
    "a NUL": request(b"GET /a HTTP/1.1", b"Host: x", b"X: a\0b"),
    "a control": request(b"GET /a HTTP/1.1", b"Host: x", b"X: a\x0bb"),
    "a delete": request(b"GET /a HTTP/1.1", b"Host: x", b"X: a\x7fb"),
    # names
    "a space before the colon": request(b"GET /a HTTP/1.1", b"Host : x"),
    "a space before the name": request(b"GET /a HTTP/1.1", b" Host: x", b"Host: x"),
    "no name": request(b"GET /a HTTP/1.1", b"Host: x", b": x"),
    "no colon": request(b"GET /a HTTP/1.1", b"Host: x", b"X"),
    "a name that is no word": request(b"GET /a HTTP/1.1", b"Host: x", b"X@: y"),
    "a name in bytes": request(b"GET /a HTTP/1.1", b"Host: x", b"Ho\xc5\xbft: y"),
    # request lines
    "no version": request(b"GET /a"),
    "two spaces": request(b"GET  /a HTTP/1.1"),
    "a tab": request(b"GET\t/a HTTP/1.1"),
    "a space behind": request(b"GET /a HTTP/1.1 "),
    "a word more": request(b"GET /a b HTTP/1.1"),
    "another protocol": request(b"GET /a ICY/1.1"),
    "a lower-case protocol": request(b"GET /a http/1.1"),
    "a longer version": request(b"GET /a HTTP/1.10"),
    "http 2": request(b"GET /a HTTP/2.0"),
    "a preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "http 3": request(b"GET /a HTTP/3.0"),
    # targets
    "an absolute target": request(b"GET http://x/a HTTP/1.1"),
    "a target without its slash": request(b"GET a HTTP/1.1"),
    "an authority": request(b"GET x:80 HTTP/1.1"),
    "a star": request(b"GET * HTTP/1.1"),
    "a fragment": request(b"GET /a#b HTTP/1.1"),
    "a target in bytes": request(b"GET /\xe9 HTTP/1.1"),
    # hosts
    "no host": b"GET /a HTTP/1.1\r\n\r\n",
    "two hosts": request(b"GET /a HTTP/1.1", b"Host: x", b"Host: y"),
    "the same host twice": request(b"GET /a HTTP/1.1", b"Host: x", b"host: x"),
    "two old hosts": request(b"GET /a HTTP/1.0", b"Host: x", b"Host: y"),
    "a list of hosts": request(b"GET /a HTTP/1.1", b"Host: x, y"),
    "a host with a path": request(b"GET /a HTTP/1.1", b"Host: x/y"),
    "a host with a user": request(b"GET /a HTTP/1.1", b"Host: u@x"),
    # where a body ends
    "both lengths": request(
        POST[:-11], b"Host: x", b"Content-Length: 5", b"Transfer-Encoding: chunked"
    ),
    "both, the other way": request(
        POST[:-11], b"Host: x", b"Transfer-Encoding: chunked", b"Content-Length: 5"
    ),
    "two lengths": request(
        POST[:-11], b"Host: x", b"Content-Length: 5", b"Content-Length: 6"
    ),
    "the same length twice": request(
        POST[:-11], b"Host: x", b"Content-Length: 5", b"Content-Length: 5"
    ),
    "a list of lengths": request(POST[:-11], b"Host: x", b"Content-Length: 5, 5"),
    "a length with a sign": request(POST[:-11], b"Host: x", b"Content-Length: +5"),
    "a length below nothing": request(POST[:-11], b"Host: x", b"Content-Length: -1"),
    "a length in hex": request(POST[:-11], b"Host: x", b"Content-Length: 0x5"),
    "a length with a point": request(POST[:-11], b"Host: x", b"Content-Length: 5.0"),
    "no number": request(POST[:-11], b"Host: x", b"Content-Length:"),
    "a length without end": request(
        POST[:-11], b"Host: x", b"Content-Length: 1" + b"0" * 20
    ),
    "another coding": request(POST[:-11], b"Host: x", b"Transfer-Encoding: gzip"),
    "two codings": request(POST[:-11], b"Host: x", b"Transfer-Encoding: gzip, chunked"),
    "chunked twice": request(
        POST[:-11], b"Host: x", b"Transfer-Encoding: chunked, chunked"
    ),
    "chunked in two lines": request(
        POST[:-11], b"Host: x", *[b"Transfer-Encoding: chunked"] * 2
    ),
    "identity": request(POST[:-11], b"Host: x", b"Transfer-Encoding: identity"),
    "a quoted coding": request(POST[:-11], b"Host: x", b'Transfer-Encoding: "chunked"'),
    "a coding with a letter more": request(
        POST[:-11], b"Host: x", b"Transfer-Encoding: xchunked"
    ),
    "an empty coding": request(POST[:-11], b"Host: x", b"Transfer-Encoding:"),
    "chunks in the old version": request(
        b"POST /a HTTP/1.0", b"Host: x", b"Transfer-Encoding: chunked"
    ),
    # chunks
    "no size": CHUNKED + b"\r\nbody\r\n0\r\n\r\n",
    "a size that is none": CHUNKED + b"zz\r\nbody\r\n0\r\n\r\n",
    "a size in 0x": CHUNKED + b"0x4\r\nbody\r\n0\r\n\r\n",
    "a size with a sign": CHUNKED + b"+4\r\nbody\r\n0\r\n\r\n",
    "a size with an underscore": CHUNKED + b"1_0\r\nbody\r\n0\r\n\r\n",
    "a space before the size": CHUNKED + b" 4\r\nbody\r\n0\r\n\r\n",
    "a space behind the size": CHUNKED + b"4 \r\nbody\r\n0\r\n\r\n",
    "a size of many digits": CHUNKED + b"0" * 20 + b"4\r\nbody\r\n0\r\n\r\n",
    "a bare line feed behind the size": CHUNKED + b"4\nbody\r\n0\r\n\r\n",
    "a bare line feed in an extension": CHUNKED + b"4;a\nb\r\nbody\r\n0\r\n\r\n",
    "a bare return in an extension": CHUNKED + b"4;a\rb\r\nbody\r\n0\r\n\r\n",
    "an extension without end": CHUNKED + b"4;" + b"x" * 300 + b"\r\nbody\r\n0\r\n\r\n",
    "a longer chunk": CHUNKED + b"4\r\nbodyx\r\n0\r\n\r\n",
    "a bare line feed behind a chunk": CHUNKED + b"4\r\nbody\n0\r\n\r\n",
    "a bare line feed at the end of chunks": CHUNKED + b"0\r\n\n",
    "a trailer": CHUNKED + b"0\r\nX: y\r\n\r\n",
    "a trailer with bare line feeds": CHUNKED + b"0\r\nX: y\n\n",
    # upgrades
    "an upgrade by post": UPGRADE.replace(b"GET", b"POST"),
    "an upgrade by get in small": UPGRADE.replace(b"GET", b"get"),
    "an old upgrade": UPGRADE.replace(b"HTTP/1.1", b"HTTP/1.0"),
    "an upgrade with a body": UPGRADE.replace(b"Host", b"Content-Length: 4\r\nHost"),
    "an upgrade with chunks": UPGRADE.replace(
        b"Host", b"Transfer-Encoding: chunked\r\nHost"
    ),
    "an upgrade to two": UPGRADE.replace(b": websocket", b": websocket, h2c"),
    "an upgrade in two lines": UPGRADE.replace(b"Host", b"Upgrade: h2c\r\nHost"),
    "an upgrade that is not one": UPGRADE.replace(b": Upgrade", b": keep-alive"),
    "an upgrade that closes": UPGRADE.replace(b": Upgrade", b": Upgrade, close"),
    "an upgrade of another version": UPGRADE.replace(b": 13", b": 8"),
    "an upgrade without a key": UPGRADE.replace(b"WebSocket-Key", b"WebSocket-Kez"),
    "an upgrade with a short key": UPGRADE.replace(b"dGhlIHNhbXBsZSBub25jZQ", b"dGhl"),
    "an upgrade with a broken key": UPGRADE.replace(b"ZQ==", b"Z==="),
    "an upgrade with two keys": UPGRADE.replace(
        b"Host", b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nHost"
    ),
}


@pytest.mark.rule("F-51", "I-42")
@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
def test_what_has_two_readings_ends_there(data: bytes) -> None:
    whole = sieved(GET + data + GET)
    assert whole.startswith(GET)
    assert whole.endswith(POISON)
    assert whole.count(GET) == 1, "nothing behind it is passed on"
    assert whole == sieved(
        *((GET + data + GET)[i : i + 1] for i in range(len(GET + data + GET)))
    )
    if data.startswith(CHUNKED):
        assert h11_sees(whole) == ["/a", "/a"]
    else:
        assert h11_sees(whole) == ["/a"]


def h11_sees(data: bytes) -> list[str]:
    """Return the targets of the requests that hypercorn's reader finds."""
    server = h11.Connection(h11.SERVER, max_incomplete_event_size=BYTES)
    server.receive_data(data)
    seen = []
    while True:
        try:
            event = server.next_event()
        except h11.RemoteProtocolError:
            return seen
        match event:
            case h11.Request():
                seen.append(event.target.decode())
            case h11.EndOfMessage():
                server.send(h11.Response(status_code=204, headers=[]))
                server.send(h11.EndOfMessage())
            case h11.PAUSED:
                try:
                    server.start_next_cycle()
                except h11.LocalProtocolError:
                    return seen
            case h11.NEED_DATA | h11.ConnectionClosed():
                return seen


def test_no_server_takes_what_stands_for_the_refused() -> None:
    assert h11_sees(GET + POISON + GET) == ["/a"]
    assert h11_sees(CHUNKED + POISON + GET) == ["/a"]
    assert h11_sees(CHUNKED + b"4\r\nbody" + POISON + GET) == ["/a"]
    assert h11_sees(CHUNKED + b"0\r\n" + POISON + GET) == ["/a"]


def test_after_the_last_request_nothing_is_passed_on() -> None:
    for last in (
        request(b"GET /a HTTP/1.1", b"Host: x", b"Connection: close"),
        request(b"GET /a HTTP/1.0"),
        request(b"CONNECT x:80 HTTP/1.1"),
    ):
        assert sieved(last + GET) == last


def test_another_protocol_is_not_offered_and_the_request_is_the_last() -> None:
    head = request(
        b"GET /a HTTP/1.1", b"Host: x", b"uPGRADE: h2c", b"Connection: Upgrade",
        b"HTTP2-Settings: AAMAAABkAAQAAP__",
    )  # fmt: skip
    passed = sieved(head + GET)
    assert b"h2c" not in passed
    assert b"HTTP2" not in passed
    assert b"Connection: close" in passed
    assert h11_sees(passed) == ["/a"]


def test_what_follows_a_handshake_waits_for_its_answer() -> None:
    sieve = Sieve(BYTES)
    assert sieve.feed(GET + UPGRADE + GET) == GET + UPGRADE
    assert sieve.switching
    assert sieve.feed(b"\0\r\n") == b""
    assert sieve.held == len(GET) + 3
    sieve.switched()
    assert sieve.feed(b"x") == GET + b"\0\r\nx"
    assert sieve.feed(b"\n\n") == b"\n\n"


def test_a_head_that_is_too_large_is_told_so_by_the_server() -> None:
    start = b"GET /a HTTP/1.1\r\nHost: x\r\nX: "
    passed = sieved(start + b"y" * BYTES, GET)
    assert passed == start + b"y" * BYTES
    assert sieved(start + b"y" * BYTES + b"\r\n\r\n" + GET) == POISON
    exact = start + b"y" * (BYTES - len(start) - 4) + b"\r\n\r\n"
    assert sieved(exact) == exact


def test_a_head_says_what_decides_about_it() -> None:
    head = read_head(UPGRADE)
    assert isinstance(head, Head)
    assert (head.method, head.target, head.length, head.last) == ("GET", "/a", 0, False)
    assert head.is_websocket
    assert refuse_handshake(head) is None
    assert read_head(b"PRI * HTTP/2.0\r\n\r\n") == 505
    assert read_head(GET[:-2]) == 400


PIECES = st.lists(
    st.sampled_from([*FINE.values(), *REFUSED.values(), UPGRADE, b"\r\n", b"\n", b"0"]),
    max_size=4,
).map(b"".join)


@given(PIECES, st.binary(max_size=30), st.integers(0, 400), st.integers(1, 60))
def test_where_the_bytes_are_cut_changes_nothing(
    data: bytes, noise: bytes, at: int, size: int
) -> None:
    data = data[:at] + noise + data[at:]
    parts = [data[i : i + size] for i in range(0, len(data), size)]
    assert sieved(*parts) == sieved(data)


@given(PIECES, st.binary(max_size=30), st.integers(0, 400))
def test_a_strict_reader_and_a_kind_one_find_the_same_requests(
    data: bytes, noise: bytes, at: int
) -> None:
    """All that passes has as many heads for h11 as it has for us."""
    data = data[:at] + noise + data[at:]
    passed = sieved(data)
    seen = h11_sees(passed)
    sieve, heads = Sieve(BYTES), 0
    read = sieve._head

    def counted() -> bytes | None:
        nonlocal heads
        part = read()
        heads += part is not None and part != POISON and part.endswith(b"\r\n\r\n")
        return part

    sieve._head = counted  # type: ignore[method-assign]
    sieve._step = counted
    sieve.feed(data)
    assert len(seen) == heads
