import os
from pathlib import Path

import pytest

from culet.kernel.errors import UsageError
from culet.web.demo.corpus import (
    FILE_BYTES,
    STDLIB_SKIP,
    Corpus,
    Document,
    corpora,
    default_corpora,
    read,
    walk,
)


def names(corpus: Corpus) -> list[str]:
    return [document.name for document in walk(corpus) if document]


def test_text_is_found_in_order_and_the_rest_left_out(tmp_path: Path) -> None:
    for name in (
        "b.py",
        "a.MD",
        "pkg/z.rst",
        "pkg/deep/c.py",
        "picture.png",
        ".hidden.py",
        ".git/config.py",
        "__pycache__/x.py",
        "tests/t.py",
        "empty.py",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if name == "empty.py" else "text")
    (tmp_path / "huge.txt").write_bytes(b"x" * (FILE_BYTES + 1))
    (tmp_path / "link.py").symlink_to(tmp_path / "b.py")

    expected = ["a.MD", "b.py", "pkg/z.rst", "pkg/deep/c.py", "tests/t.py"]
    assert expected == names(Corpus(tmp_path))
    assert expected[:-1] == names(Corpus(tmp_path, skip=STDLIB_SKIP))


def test_one_folder_has_no_label_and_several_have_distinct_ones(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("x/docs", "y/docs", "z")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "a.md").write_text("text")

    assert names(corpora(folders[:1])[0]) == ["a.md"]
    assert [name for corpus in corpora(folders) for name in names(corpus)] == [
        "docs/a.md",
        "docs-2/a.md",
        "z/a.md",
    ]


@pytest.mark.parametrize("name", ["absent", "file.txt"])
def test_what_is_no_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file.txt").write_text("text")
    with pytest.raises(UsageError, match="is not a folder"):
        corpora([tmp_path / name])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a\r\nb\n", "a\r\nb\n"),
        ("\ufeffä".encode(), "\ufeffä"),
        (b"\xff\xfe", None),
        (b"a\0b", None),
    ],
)
def test_text_is_read_exactly_or_not_at_all(
    tmp_path: Path, content: bytes, expected: str | None
) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    (document,) = [d for d in walk(Corpus(tmp_path)) if d]
    assert expected == read(document)


def test_what_vanished_is_no_text(tmp_path: Path) -> None:
    assert read(Document("a", tmp_path / "a", ("a",), 1, 1)) is None
    assert names(Corpus(tmp_path / "absent")) == []


@pytest.mark.skipif(os.name != "posix", reason="names are text elsewhere")
def test_a_name_that_is_not_text_is_left_out(tmp_path: Path) -> None:
    try:
        (tmp_path / os.fsdecode(b"\xff.py")).write_text("x")
    except OSError:
        pytest.skip("this file system refuses such names")
    assert names(Corpus(tmp_path)) == []


def test_the_defaults_are_large_and_hold_no_tests() -> None:
    found = [name for corpus in default_corpora() for name in names(corpus)]

    assert {"stdlib/queue.py", "trio/_channel.py", "README.md"} <= set(found)
    assert len(found) > 500
    assert not [
        name
        for name in found
        if {"test", "_tests", "idlelib", "lib2to3", "site-packages"}
        & set(name.split("/"))
    ]


def test_the_module_of_a_document_is_how_code_would_name_it(tmp_path: Path) -> None:
    for name in ("pkg/__init__.py", "pkg/mod.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = {d.name: d.module for d in walk(Corpus(tmp_path, package="top")) if d}
    assert found["pkg/mod.py"] == ("top", "pkg", "mod")
    assert found["pkg/__init__.py"] == ("top", "pkg")
