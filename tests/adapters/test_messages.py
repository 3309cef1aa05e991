"""The rules for a chat's messages: what a request changes, what a turn leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.adapters import messages as rules

Stored = dict[str, str]


def m(message_id: str, role: str = "user") -> dict[str, Any]:
    return {"id": message_id, "role": role, "parts": []}


@pytest.mark.rule("W-152", "W-153")
@pytest.mark.parametrize(
    ("stored", "incoming", "deleted", "put"),
    [
        ({}, [m("u1")], [], ["u1"]),
        ({"u1": "user"}, [m("u1"), m("u2")], [], ["u1", "u2"]),
        # a client that knows less than the server, with something new
        ({"u1": "user", "a1": "assistant"}, [m("u2")], [], ["u2"]),
        # regenerate and edit: all is known, so the rest goes
        ({"u1": "user", "a1": "assistant"}, [m("u1")], ["a1"], ["u1"]),
        # the server's answer stays as the server has it
        ({"u1": "user", "a1": "assistant"}, [m("u1"), m("a1", "assistant"), m("u2")],
         [], ["u1", "u2"]),
        # an empty list is no regenerate of nothing
        ({"u1": "user"}, [], [], []),
        # without an id it is none
        ({}, [m("")], [], []),
    ],
)  # fmt: skip
def test_a_request_deletes_only_when_all_of_it_is_known(
    stored: Stored, incoming: list[Any], deleted: list[str], put: list[str]
) -> None:
    merged = rules.merge(stored, incoming)
    assert merged.delete == deleted
    assert [p["id"] for p in merged.put] == put


ids = st.sampled_from(["u1", "u2", "u3", "a1", "a2"])


def message_of(message_id: str) -> dict[str, Any]:
    return m(message_id, "assistant" if message_id.startswith("a") else "user")


@given(st.lists(ids, unique=True), st.lists(ids, unique=True))
def test_after_a_merge_every_incoming_message_is_there(
    stored: list[str], incoming: list[str]
) -> None:
    before = {i: message_of(i)["role"] for i in stored}
    merged = rules.merge(before, [message_of(i) for i in incoming])
    after = (set(stored) - set(merged.delete)) | {p["id"] for p in merged.put}
    assert set(incoming) <= after
    assert after - set(incoming) in (set(), set(stored) - set(incoming))
    again = rules.merge({i: message_of(i)["role"] for i in after},
                        [message_of(i) for i in incoming])  # fmt: skip
    kept = after - set(again.delete)
    assert kept | {p["id"] for p in again.put} == set(incoming) or not incoming


@pytest.mark.rule("W-163")
def test_only_user_messages_at_the_end_trail() -> None:
    assert rules.trailing_user_ids([]) == []
    messages = [m("u1"), m("a1", "assistant"), m("u2"), m("u3")]
    assert rules.trailing_user_ids(messages) == ["u2", "u3"]


def tool(state: str, **more: Any) -> dict[str, Any]:
    return {
        "type": "tool-x",
        "toolCallId": "c",
        "toolName": "x",
        "state": state,
        **more,
    }


ASK = {"type": "tool-input-available", "toolCallId": "c", "toolName": "x", "input": {}}
DONE = {"type": "tool-output-available", "toolCallId": "c", "output": 1}


@pytest.mark.rule("W-241")
@pytest.mark.parametrize(
    ("chunks", "ended", "part"),
    [
        ([ASK, DONE], "aborted", tool("output-available", input={}, output=1)),
        ([ASK], "aborted", tool("output-error", input={}, errorText="aborted")),
        ([ASK], "error",
         tool("output-error", input={}, errorText="the turn ended: error")),
        ([ASK, {**DONE, "preliminary": True}], "aborted",
         tool("output-error", input={}, errorText="aborted")),
        ([ASK, {**DONE, "preliminary": True}, DONE], "aborted",
         tool("output-available", input={}, output=1)),
        # left to a client's tool, or going on
        ([ASK], "completed", tool("input-available", input={})),
        ([ASK], None, tool("input-available", input={})),
    ],
)  # fmt: skip
def test_a_finished_tool_part_keeps_its_status_and_others_end(
    chunks: list[Any], ended: str | None, part: dict[str, Any]
) -> None:
    message = rules.assistant_message("a", chunks, ended=ended)
    assert message is not None
    assert message["parts"] == [part]


@pytest.mark.rule("W-241")
def test_nothing_streams_after_the_end() -> None:
    chunks = [{"type": "text-delta", "id": "t", "delta": "cut"}]
    going = rules.assistant_message("a", chunks, ended=None)
    ended = rules.assistant_message("a", chunks, ended="aborted")
    assert going is not None
    assert ended is not None
    assert going["parts"][0]["state"] == "streaming"
    assert ended["parts"] == [{"type": "text", "text": "cut", "state": "done"}]


@pytest.mark.rule("W-242")
def test_a_turn_that_showed_nothing_leaves_no_message() -> None:
    chunks = [{"type": "start", "messageId": "a"}, {"type": "start-step"}]
    assert rules.assistant_message("a", chunks, ended="aborted") is None


@pytest.mark.rule("W-240")
def test_metadata_of_all_chunks_is_merged() -> None:
    chunks = [
        {"type": "start", "messageMetadata": {"a": 1, "b": 1}},
        {"type": "text-delta", "id": "t", "delta": "x"},
        {"type": "message-metadata", "messageMetadata": {"b": 2}},
        {"type": "finish", "messageMetadata": {"c": 3}},
    ]
    message = rules.assistant_message("a", chunks, ended="completed")
    assert message is not None
    assert message["metadata"] == {"a": 1, "b": 2, "c": 3}


def test_a_continuation_goes_on_in_its_message_and_leaves_the_base_alone() -> None:
    base = {
        "id": "a",
        "role": "assistant",
        "parts": [tool("input-available", input={})],
    }
    chunks = [DONE, {"type": "text-delta", "id": "t", "delta": "so"}]
    message = rules.assistant_message("a", chunks, ended="completed", base=base)
    assert message is not None
    assert [p.get("text") or p["output"] for p in message["parts"]] == [1, "so"]
    assert base["parts"] == [tool("input-available", input={})]


def test_a_run_s_input_becomes_messages_with_stable_ids() -> None:
    assert rules.input_messages("hello", "r") == rules.input_messages("hello", "r")
    text = [{"type": "text", "text": "hello"}]
    assert rules.input_messages("hello", "r") == [
        {"id": "agent-tool-r-input", "role": "user", "parts": text}
    ]
    two = rules.input_messages([{"role": "user", "parts": []}] * 2, "r")
    assert [t["id"] for t in two] == ["agent-tool-r-input", "agent-tool-r-input-1"]
    own = rules.input_messages({"id": "own", "role": "user", "parts": []}, "r")
    assert own[0]["id"] == "own"


def test_an_input_that_is_no_text_is_shown_as_json() -> None:
    assert rules.input_text("as it is") == "as it is"
    assert rules.input_text({"q": 1}) == '{\n  "q": 1\n}'


@pytest.mark.rule("W-239")
def test_a_tool_call_id_that_was_used_is_replaced_the_same_way_each_time() -> None:
    assert rules.unique_call_id("c7", {"c0"}, "a", 1) == "c7"
    assert rules.unique_call_id("c0", {"c0"}, "a", 1) == "call-a-1"
    assert rules.unique_call_id("", set(), "a", 2) == "call-a-2"


@pytest.mark.parametrize(
    "chunk",
    [
        {"type": "message-metadata", "messageMetadata": 3},
        {"type": "start", "messageMetadata": ["x"]},
        {"type": "tool-output-available", "toolCallId": ["x"], "output": 1},
    ],
)
def test_a_chunk_that_makes_no_sense_says_nothing(chunk: dict[str, Any]) -> None:
    told = [{"type": "text-delta", "id": "t", "delta": "hello"}, chunk]
    base = {"id": "m", "role": "assistant", "parts": [], "metadata": "odd"}
    for before in (None, base):
        made = rules.assistant_message("m", told, ended="completed", base=before)
        assert made is not None
        assert made["parts"][0]["text"] == "hello"
        assert "metadata" not in made
