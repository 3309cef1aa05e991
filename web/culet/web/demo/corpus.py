"""Which documents the demo answers from, and how they are read.

A `Corpus` is a folder (or one file) with a label. A document's public name is its
path below the folder with `/`, after the label when there are several corpora:
`stdlib/queue.py`. Text is kept exactly as it stands in the file, so that a quote can
be compared byte for byte; what is not valid UTF-8, holds NUL or is huge is left out.

Nothing here knows of agents or of SQL.
"""

from __future__ import annotations

import os
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from culet.kernel.errors import UsageError

FILE_BYTES: Final = 2 << 20  # larger files are data, not documents
DOCUMENTS_MAX: Final = 20_000  # of all corpora together
_TEXT: Final = """
    .adoc .c .cc .cfg .cpp .css .go .h .hpp .html .ini .java .js .jsx .kt .lua .md .mjs
    .php .pl .proto .py .pyi .r .rb .rs .rst .scala .sh .sql .swift .tex .toml .ts .tsx
    .txt .yaml .yml
"""
SUFFIXES: Final = frozenset(_TEXT.split())
NEVER: Final = frozenset({"__pycache__", "node_modules"})
STDLIB_SKIP: Final = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}
)
PACKAGE_SKIP: Final = frozenset({"tests", "_tests"})


class Corpus(msgspec.Struct, frozen=True):
    """A folder, or one file, of documents.

    `label` prefixes the public names ("" for none), `package` the dotted names of what
    its code defines, `skip` names folders that are left out at any depth.
    """

    path: Path
    label: str = ""
    package: str = ""
    skip: frozenset[str] = frozenset()


class Document(msgspec.Struct, frozen=True):
    """A file as it was found; `size` and `mtime_ns` are its fingerprint."""

    name: str  # public: label and path below the corpus
    path: Path
    module: tuple[str, ...]  # package and path without suffix, for dotted names
    size: int
    mtime_ns: int


def corpora(folders: Sequence[str | Path]) -> list[Corpus]:
    """Return the corpora of the folders a person named, labelled if several.

    Equal folder names get a number: `docs`, `docs-2`. Raises `UsageError` for one that
    does not exist.
    """
    found: list[Corpus] = []
    labels: set[str] = set()
    for folder in folders:
        path = Path(folder).expanduser().resolve()
        if not path.is_dir():
            msg = f"{str(folder)!r} is not a folder; name one that holds documents"
            raise UsageError(msg)
        label = base = path.name or "root"
        number = 1
        while label in labels:
            number += 1
            label = f"{base}-{number}"
        labels.add(label)
        found.append(Corpus(path, label if len(folders) > 1 else "", package=path.name))
    return found


def default_corpora() -> list[Corpus]:
    """Return the standard library, the installed trio, and this project's docs."""
    found = [Corpus(Path(sysconfig.get_path("stdlib")), "stdlib", skip=STDLIB_SKIP)]
    trio = find_spec("trio")
    if trio is not None and trio.origin is not None:
        found.append(Corpus(Path(trio.origin).parent, "trio", "trio", PACKAGE_SKIP))
    project = Path(__file__).resolve().parents[4]
    if (project / "pyproject.toml").is_file():
        found += [
            Corpus(path, label)
            for path, label in ((project / "docs", "docs"), (project / "README.md", ""))
            if path.exists()
        ]
    return found


def walk(corpus: Corpus) -> Iterator[Document | None]:
    """Yield the documents of a corpus in the order of their names.

    Yields None after each folder entry that is none, so that a caller with little time
    can stop anywhere. What vanishes or cannot be read meanwhile is left out; links are
    not followed.
    """
    if corpus.path.is_file():
        yield _document(corpus, corpus.path, corpus.path.name)
        return
    stack = [(corpus.path, "")]
    while stack:
        folder, prefix = stack.pop()
        below: list[tuple[Path, str]] = []
        for entry in _entries(folder):
            if entry.name.startswith(".") or entry.is_symlink():
                continue
            name = prefix + entry.name
            if entry.is_dir():
                if entry.name not in corpus.skip | NEVER:
                    below.append((Path(entry.path), name + "/"))
            elif os.path.splitext(entry.name)[1].lower() in SUFFIXES:
                yield _document(corpus, Path(entry.path), name)
            yield None
        stack += reversed(below)


def read(document: Document) -> str | None:
    """Return the exact text, or None if it is gone or is not text."""
    try:
        data = document.path.read_bytes()
        return None if b"\0" in data else data.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _entries(folder: Path) -> Iterable[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except OSError:
        return []


def _document(corpus: Corpus, path: Path, name: str) -> Document | None:
    try:
        name.encode("utf-8")  # a name that is not text cannot be cited
        status = path.stat()
    except (OSError, UnicodeEncodeError):
        return None
    if not stat.S_ISREG(status.st_mode) or not 0 < status.st_size <= FILE_BYTES:
        return None
    module = [corpus.package, *os.path.splitext(name)[0].split("/")]
    return Document(
        name=f"{corpus.label}/{name}" if corpus.label else name,
        path=path,
        module=tuple(part for part in module if part and part != "__init__"),
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
    )
