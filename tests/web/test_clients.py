"""The published npm clients and a real browser against a real server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from culet.kernel.core.path import kebab

JS = Path(__file__).parent.parent / "js"
DOCS = JS.parent / "kill" / "docs"
NODE = shutil.which("node")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PACKAGES = all((JS / at / "node_modules/.stamp").exists() for at in ("", "older"))
IN_CI = "CI" in os.environ
CLASS_NAMES = (
    "Desk", "MyAgent", "AIChat", "MY_AGENT", "COUNTER_DO", "HTTP2", "My_Agent",
    "chat", "already-kebab", "_UnboundParent", "TestSubAgentParent", "A", "Agent_",
)  # fmt: skip

needs_packages = pytest.mark.skipif(
    not (NODE and PACKAGES) and not IN_CI, reason="run `make js` first (Node 20)"
)
needs_browser = pytest.mark.skipif(
    not (NODE and PACKAGES and CHROMIUM) and not IN_CI, reason="there is no chromium"
)


@pytest.fixture(params=[(), ("--plain",)], ids=["own", "hypercorn"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    command = [sys.executable, str(JS / "server.py"), "--demo", str(DOCS)]
    server = subprocess.Popen(
        [*command, "--data", str(tmp_path / "data"), *request.param],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline().strip()
        assert line, "the server did not start"
        yield line
    finally:
        server.terminate()
        server.communicate(timeout=20)


def run_node(name: str, *options: str, **env: str) -> None:
    assert NODE is not None, "CI needs node"
    clean = {k: v for k, v in os.environ.items() if k != "NODE_TEST_CONTEXT"}
    done = subprocess.run(
        [NODE, *options, "--test", "--test-reporter=tap", name],
        cwd=JS,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**clean, **env},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert "# skipped 0" in done.stdout, done.stdout[-3000:]


@needs_packages
def test_our_reducer_equals_the_published_one() -> None:
    run_node("peer.test.mjs")


@pytest.fixture(params=["current", "older"])
def generation(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Which of the two generations of published packages; options for node."""
    return ("--import", "./older.mjs") if request.param == "older" else ()


@pytest.mark.rule("W-009", "W-065", "W-099", "W-251", "W-253", "W-254")
@needs_packages
@pytest.mark.slow
def test_the_published_clients_work_with_the_gateway(
    url: str, generation: tuple[str, ...]
) -> None:
    packages = "older" if generation else ""
    run_node("clients.test.mjs", *generation, CULET_URL=url, CULET_PACKAGES=packages)


@needs_packages
@pytest.mark.slow
@pytest.mark.rule("C-070", "C-072", "W-099", "W-177", "W-253")
def test_the_published_client_runs_tools_and_approves_calls(
    url: str, generation: tuple[str, ...]
) -> None:
    packages = "older" if generation else ""
    run_node("tools.test.mjs", *generation, CULET_URL=url, CULET_PACKAGES=packages)


@pytest.mark.rule("W-099", "W-252", "W-253", "W-254")
@needs_packages
@pytest.mark.slow
def test_the_published_hooks_show_states_reports_and_slow_beginnings(
    url: str, generation: tuple[str, ...]
) -> None:
    packages = "older" if generation else ""
    run_node("hooks.test.mjs", *generation, CULET_URL=url, CULET_PACKAGES=packages)


@needs_packages
@pytest.mark.slow
def test_our_own_client_works_with_the_gateway(url: str) -> None:
    run_node("own.test.mjs", CULET_URL=url)


def said_in(name: str) -> set[str]:
    """Return the rules that the titles of a file's tests name."""
    titles = re.findall(r"""^test\((["'`].*)$""", (JS / name).read_text(), re.MULTILINE)
    return {rule for title in titles for rule in re.findall(r"W-\d+", title)}


def marked_for(test: pytest.FixtureRequest) -> set[str]:
    """Return the rules that a test is marked with."""
    return {rule for mark in test.node.iter_markers("rule") for rule in mark.args}


@needs_packages
@pytest.mark.rule("W-002", "W-003", "W-011", "W-012", "W-043")
def test_the_published_client_dials_and_waits_as_the_paper_says(
    request: pytest.FixtureRequest, generation: tuple[str, ...]
) -> None:
    name = "address.test.mjs"
    assert said_in(name) == marked_for(request)
    segments = json.dumps({class_name: kebab(class_name) for class_name in CLASS_NAMES})
    packages = "older" if generation else ""
    run_node(name, *generation, CULET_KEBABS=segments, CULET_PACKAGES=packages)


@needs_packages
@pytest.mark.slow
@pytest.mark.parametrize("url", [()], ids=["own"], indirect=True)
@pytest.mark.rule("W-004", "W-012", "W-032", "W-043", "W-046", "W-054")
@pytest.mark.rule("W-065", "W-066", "W-067", "W-069", "W-072", "W-082")
def test_the_published_client_reacts_as_the_paper_says(
    request: pytest.FixtureRequest, url: str, generation: tuple[str, ...]
) -> None:
    name = "wire.test.mjs"
    assert said_in(name) == marked_for(request)
    packages = "older" if generation else ""
    run_node(name, *generation, CULET_URL=url, CULET_PACKAGES=packages)


@needs_packages
@pytest.mark.slow
@pytest.mark.parametrize("url", [()], ids=["own"], indirect=True)
@pytest.mark.rule("W-105", "W-108", "W-152", "W-160", "W-161")
@pytest.mark.rule("W-212", "W-217", "W-232", "W-235", "W-251", "W-252", "W-255")
def test_the_published_hooks_make_of_turns_and_runs_what_the_paper_says(
    request: pytest.FixtureRequest, url: str, generation: tuple[str, ...]
) -> None:
    name = "turns.test.mjs"
    assert said_in(name) == marked_for(request)
    packages = "older" if generation else ""
    run_node(name, *generation, CULET_URL=url, CULET_PACKAGES=packages)


@needs_packages
@pytest.mark.slow
@pytest.mark.rule("W-140", "W-209")
def test_the_published_hooks_go_on_when_their_server_was_killed(
    request: pytest.FixtureRequest, generation: tuple[str, ...]
) -> None:
    name = "killed.test.mjs"
    assert said_in(name) == marked_for(request)
    run_node(name, *generation, CULET_PYTHON=sys.executable)


@pytest.mark.rule("W-094", "W-095", "W-098", "W-255")
@needs_packages
@pytest.mark.slow
def test_use_chat_of_the_ai_sdk_works_over_plain_http(
    url: str, generation: tuple[str, ...]
) -> None:
    run_node("sse.test.mjs", *generation, CULET_URL=url)


@needs_packages
def test_the_npm_package_is_whole_small_and_typed() -> None:
    run_node("package.test.mjs")


@needs_packages
def test_our_hooks_by_themselves() -> None:
    run_node("react.test.mjs")


@needs_packages
def test_ids_of_any_kind_are_kept_apart_and_shown_as_text() -> None:
    run_node("hostile.test.mjs")


@needs_browser
@pytest.mark.slow
def test_the_page_in_a_browser(url: str) -> None:
    run_node("page.test.mjs", CULET_URL=url)


@needs_browser
@pytest.mark.slow
def test_the_page_survives_kill_9_of_its_server(tmp_path: Path) -> None:
    command = (
        f"{sys.executable} -m culet.web demo --data {{dir}} --port {{port}}"
        f" --docs {DOCS} --pace 0.1"
    )
    run_node("survive.test.mjs", CULET_CMD=command, CULET_DIR=str(tmp_path / "data"))


@needs_browser
@pytest.mark.slow
def test_the_inspector_in_a_browser() -> None:
    command = [sys.executable, str(JS / "inspect-server.py")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None
            run_node("inspect.test.mjs", CULET_URL=server.stdout.readline().strip())
        finally:
            server.terminate()
