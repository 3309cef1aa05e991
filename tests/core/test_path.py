"""URLs of agents: every row of the vectors, the stricter rules, and the round trip."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.kernel.core.limits import DEPTH_MAX, NAME_MAX
from culet.kernel.core.path import (
    ParsedPath,
    PathStep,
    build_agent_path,
    build_agent_url,
    check_classes,
    check_name,
    kebab,
    parse_agent_path,
)
from culet.kernel.errors import NotFound, UsageError

VECTORS = json.loads(
    (Path(__file__).parent.parent / "vectors" / "paths.json").read_text()
)
CLASSES = ["JobRunner", "HTTPWorker", "Researcher"]
KNOWN = ["Supervisor", *CLASSES]


def rows(name: str) -> list[object]:
    return [
        pytest.param(row, id=row.get("id") or json.dumps(row)[:40])
        for row in VECTORS[name]
    ]


def steps_of(row: dict) -> list[PathStep]:
    return [PathStep(step["className"], step["name"]) for step in row["path"]]


@pytest.mark.rule("F-152", "F-153", "F-155", "F-156", "F-157", "F-158", "F-159")
@pytest.mark.parametrize("row", rows("build_rows"))
def test_builds_as_the_vectors_say(row: dict) -> None:
    options = row.get("options", {})
    steps = steps_of(row)

    def build() -> str:
        return build_agent_path(
            steps,
            prefix=options.get("prefix", "agents"),
            leaf_path=options.get("leafPath"),
            root_binding=options.get("rootBinding"),
        )

    if "error" in row["built"]:
        with pytest.raises(UsageError):
            build()
        return
    path = build()
    assert path == row["built"]["ok"]
    if row.get("round_trip"):
        known = {step.class_name for step in steps}
        parsed = parse_agent_path(path, known, options.get("prefix", "agents"))
        assert parsed == ParsedPath(steps[0], tuple(steps[1:]), "/")


# What `stricter` says on top of the reference's answers, which are in the vectors.
REFUSED = {
    "PP-05": NotFound,  # a marker without class and name
    "PP-07": UsageError,  # a marker where the root's class must be
    "PP-09": NotFound,  # a class is matched by its segment, not by its name
    "PP-11": NotFound,
    "PP-13": UsageError,  # dot segments
    "PP-17": UsageError,  # NUL
    "PP-19": UsageError,  # a broken escape
    "PP-21": NotFound,
    "PP-25": UsageError,  # a root named `sub`
    "PP-31": UsageError,
    "PP-37": NotFound,  # never skip ahead to a later marker
}


@pytest.mark.rule("F-167", "F-169", "F-170", "F-172", "F-180", "F-38")
@pytest.mark.parametrize("row", rows("parse_rows"))
def test_parses_as_the_vectors_say_and_stricter(row: dict) -> None:
    refusal = REFUSED.get(row["id"])
    if refusal is not None:
        with pytest.raises(refusal):
            parse_agent_path(row["raw"], KNOWN)
        return
    parsed = parse_agent_path(row["raw"], KNOWN)
    assert parsed is not None
    hop, known = parsed.hops[0], row["known"]
    assert (hop.class_name, hop.name) == (known["childClass"], known["childName"])
    assert parsed.root == PathStep("Supervisor", "u")
    rest = "".join(
        f"/sub/{kebab(later.class_name)}/{later.name}" for later in parsed.hops[1:]
    ) + (parsed.leaf_path if parsed.leaf_path != "/" or not parsed.hops[1:] else "")
    assert rest == known["remainingPath"]


@pytest.mark.rule("W-002")
@pytest.mark.parametrize("row", rows("kebab_rows"))
def test_kebab_is_the_clients(row: dict) -> None:
    assert kebab(row["className"]) == row["kebab"]


@pytest.mark.parametrize(
    ("name", "segment"),
    [
        ("Counter", "counter"), ("MyAgent", "my-agent"), ("ChatRoom", "chat-room"),
        ("TestSubAgentParent", "test-sub-agent-parent"), ("COUNTER_DO", "counter-do"),
        ("HTTP2", "http2"), ("SUB", "sub"), ("Sub", "sub"), ("Sub_", "sub"),
        ("SubThing", "sub-thing"), ("AIAssistant", "a-i-assistant"),
        ("My_Agent", "my--agent"), ("_UnboundParent", "--unbound-parent"),
    ],
)  # fmt: skip
def test_odd_class_names_have_the_segments_of_the_clients(
    name: str, segment: str
) -> None:
    assert kebab(name) == segment


@pytest.mark.rule("F-164", "F-165")
@pytest.mark.parametrize("row", rows("origin_rows"))
def test_origins(row: dict) -> None:
    steps = [PathStep("Supervisor", "u"), PathStep("JobRunner", "r")]
    if "error" in row["result"]:
        with pytest.raises(UsageError):
            build_agent_url(row["origin"], steps)
    else:
        assert build_agent_url(row["origin"], steps) == row["result"]["ok"]


@pytest.mark.rule("F-174")
@pytest.mark.parametrize("row", rows("kebab_collisions"))
def test_classes_that_share_a_segment_are_refused(row: dict) -> None:
    assert {kebab(name) for name in row["classNames"]} == {row["segment"]}
    with pytest.raises(UsageError):
        check_classes(row["classNames"])


@pytest.mark.rule("F-013")
@pytest.mark.parametrize("name", ["Sub", "SUB", "Sub_", "sub"])
def test_class_sub_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name}.*reserved"):
        check_classes([name])


def test_a_class_may_be_listed_twice() -> None:
    assert check_classes(["JobRunner", "JobRunner"]) == {"job-runner": "JobRunner"}


@pytest.mark.rule("F-37", "W-005")
@pytest.mark.parametrize(
    "name", ["", "a\0b", ".", "..", "x" * (NAME_MAX + 1), "\ud800", 7, None]
)
def test_bad_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        check_name(name)


@pytest.mark.rule("F-382")
@pytest.mark.parametrize("name", ["...", "sub", "x" * NAME_MAX, "a/../b", "%2e", " "])
def test_odd_names_of_children_are_fine(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.rule("F-383")
def test_a_root_cannot_be_called_sub() -> None:
    with pytest.raises(UsageError, match="sub"):
        check_name("sub", root=True)


@pytest.mark.rule("F-154", "W-004")
def test_a_root_name_is_decoded_once_and_a_percent_is_not_built() -> None:
    parsed = parse_agent_path("/agents/supervisor/a%2520b", KNOWN)
    assert parsed is not None
    assert parsed.root.name == "a%20b"
    with pytest.raises(UsageError):
        build_agent_path([("Supervisor", "a%20b")])


@pytest.mark.parametrize(
    "raw", ["/", "/agents", "/agents/supervisor", "/other/supervisor/u", "/agent/a/b"]
)
def test_what_is_not_ours_falls_through(raw: str) -> None:
    assert parse_agent_path(raw, KNOWN) is None


@pytest.mark.parametrize(
    "raw",
    [
        "/agents/unknown/u",
        "/agents/supervisor/%ff",
        "/agents/supervisor/u\\..\\x",
        "/agents/supervisor/u/%2E%2e/x",
        "/agents/supervisor/..",
        "/agents/supervisor/" + "x" * 257,
        "/agents/supervisor/u/sub/job-runner/\ud800",
    ],
)
def test_bad_targets_are_usage_errors(raw: str) -> None:
    with pytest.raises(UsageError):
        parse_agent_path(raw, KNOWN)


@pytest.mark.rule("I-27", "F-380")
def test_depth_is_bounded() -> None:
    hop = "/sub/job-runner/x"
    root = "/agents/supervisor/u"
    parsed = parse_agent_path(root + hop * (DEPTH_MAX - 1), KNOWN)
    assert parsed is not None
    assert len(parsed.steps) == DEPTH_MAX
    with pytest.raises(UsageError):
        parse_agent_path(root + hop * DEPTH_MAX, KNOWN)
    with pytest.raises(UsageError):
        build_agent_path([("Supervisor", "u")] + [("JobRunner", "x")] * DEPTH_MAX)


def test_a_path_needs_a_step_and_an_origin_that_parses() -> None:
    with pytest.raises(UsageError):
        build_agent_path([])
    for origin in ("http://[::1", "http://h:99999", "ftp://h", "https://", "//h"):
        with pytest.raises(UsageError):
            build_agent_url(origin, [("A", "u")])
    url = build_agent_url("wss://H.test:443/", [("A", "u")], leaf_path="x")
    assert url == "wss://h.test/agents/a/u/x"


@pytest.mark.rule("F-161", "F-162", "F-163")
def test_prefixes_and_leaves() -> None:
    steps = [("Supervisor", "u")]
    for prefix in ("", "/a", "a/", "a//b", "a/../b", ".", "sub", "a?b", "%2e", "a b"):
        with pytest.raises(UsageError):
            build_agent_path(steps, prefix=prefix)
    for leaf in ("a?b", "a#b", "../x", "//", "a//b", "a/", "a b", "/%2E%2e", "é"):
        with pytest.raises(UsageError):
            build_agent_path(steps, leaf_path=leaf)
    assert build_agent_path(steps, "api/v1", "/") == "/api/v1/supervisor/u/"
    assert build_agent_path(steps, leaf_path="a/b") == "/agents/supervisor/u/a/b"
    assert build_agent_path(steps, root_binding="COUNTER_DO") == "/agents/counter-do/u"


@pytest.mark.rule("W-006")
def test_a_leaf_keeps_later_markers_and_cannot_begin_with_one() -> None:
    parsed = parse_agent_path("/agents/supervisor/u/files/sub/job-runner/r?a=1", KNOWN)
    assert parsed is not None
    assert parsed.hops == ()
    assert parsed.leaf_path == "/files/sub/job-runner/r"
    with pytest.raises(UsageError):
        build_agent_path([("Supervisor", "u")], leaf_path="/sub/job-runner/r")


nasty = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1
) | st.sampled_from(["a/../b", "%2e%2e", "%", "x/sub/admin/root", "\\", "?#", "é", "."])
names = nasty.filter(lambda name: name not in {".", ".."}).map(lambda n: n[:NAME_MAX])
plain = st.from_regex(r"[A-Za-z0-9!$&'()*+,\-.:;=@_~]{1,20}", fullmatch=True)
roots = plain.filter(lambda name: name not in {".", "..", "sub"})


@pytest.mark.rule("F-166", "I-27", "W-001")
@given(
    roots, st.lists(st.tuples(st.sampled_from(CLASSES), names), max_size=DEPTH_MAX - 1)
)
def test_round_trip(root: str, children: list[tuple[str, str]]) -> None:
    steps = [PathStep("Supervisor", root), *(PathStep(*child) for child in children)]
    parsed = parse_agent_path(build_agent_path(steps, leaf_path="/a/b"), KNOWN)
    assert parsed == ParsedPath(steps[0], tuple(steps[1:]), "/a/b")


@given(
    st.lists(
        st.sampled_from(
            ["agents", "supervisor", "sub", "job-runner", "r", "%2F", "%", "", "..",
             "%00", "%2e", "\\", "é", "sub ", "#", "?"]
        )
    ).map(lambda parts: "/" + "/".join(parts))
    | st.text()
)  # fmt: skip
def test_parsing_answers_or_refuses_and_nothing_else(raw: str) -> None:
    try:
        parsed = parse_agent_path(raw, KNOWN)
    except (UsageError, NotFound):
        return
    for step in parsed.steps if parsed else ():
        assert step.class_name in KNOWN
        assert check_name(step.name) == step.name
