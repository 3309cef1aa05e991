"""The order in which one client hears things that belong together."""

from __future__ import annotations

import pytest

from web.serving import serving

pytestmark = pytest.mark.usefixtures("transport")


async def test_the_answer_to_a_call_stands_behind_the_frames_of_its_run() -> None:
    async with serving() as server, server.connect() as client:
        await client.hello()
        await client.send(
            {"type": "rpc", "id": "w", "method": "write", "args": ["r", 300]}
        )

        kinds: list[str] = []
        while not kinds or kinds[-1] != "rpc":
            frame = await client.frame()
            kinds.append(frame["event"]["kind"] if "event" in frame else frame["type"])

        assert kinds[0] == "started"
        assert kinds.count("chunk") == 300
        assert kinds[-2:] == ["finished", "rpc"]


@pytest.mark.rule("W-051", "W-087")
async def test_calls_in_flight_begin_in_the_order_in_which_they_were_sent() -> None:
    async with serving() as server, server.connect() as client:
        await client.hello()
        for i in range(50):
            call = {"type": "rpc", "id": str(i), "method": "note", "args": [f"v{i}"]}
            await client.send(call)

        answers = {}
        while len(answers) < 50:
            frame = await client.frame()
            answers[int(frame["id"])] = frame["result"]

        assert answers == {i: i + 1 for i in range(50)}
