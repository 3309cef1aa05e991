"""The doctor's reader, written apart from recovery, comes to the same files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from culet.storage.doctor_log import build, fold, read_log
from culet.storage.doctor_msgpack import decode
from storage import power

IMAGES = 200


@pytest.mark.slow
def test_the_doctor_agrees_with_recovery_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, agreed = power.check, 0

    def compare(
        proof: power.Proof, folder: str, snapshots: dict[int, dict[str, bytes]], must: int
    ) -> str | None:  # fmt: skip
        nonlocal agreed
        proof.templates.keep()
        left, built = str(tmp_path / "left"), str(tmp_path / "built")
        for path in (left, built):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(folder, left)
        wrong = check(proof, folder, snapshots, must)
        found = read_log(left)
        os.makedirs(built)
        for name, image in fold(found).items():
            build(left, image, name, f"{proof.folder}/templates", built)
        if wrong is None and found.records:
            if power.image_of(built) != power.image_of(folder):
                return f"the doctor differs at record {found.lsn}"
            agreed += 1
        return wrong

    monkeypatch.setattr(power, "check", compare)
    proof = power.prove(str(tmp_path / "proof"), images=IMAGES, level="power")

    assert proof.bad == []
    assert agreed > IMAGES * 0.9
    assert proof.nested > IMAGES // 8


names = st.text(max_size=300)
numbers = st.integers(0, 2**64 - 1)
values = st.recursive(
    st.none() | names | numbers | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=20),
    max_leaves=30,
)


def depth(value: object) -> int:
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(values.filter(lambda value: depth(value) <= 4))
def test_what_the_log_writes_is_read_the_same(value: object) -> None:
    assert decode(msgspec.msgpack.encode(value)) == value


@pytest.mark.parametrize(
    "value", ["x" * 70_000, b"x" * 70_000, [1] * 70_000], ids=["text", "bytes", "list"]
)
def test_long_values_are_read(value: object) -> None:
    assert decode(msgspec.msgpack.encode(value)) == value


@given(st.binary(max_size=60))
def test_anything_else_is_a_value_error(data: bytes) -> None:
    try:
        value = decode(data)
    except ValueError:
        return
    assert msgspec.msgpack.decode(data) == value


@pytest.mark.parametrize("value", [[[[[[1]]]]], {"a": 1}, -1, 1.5, True])
def test_shapes_that_no_log_holds_are_refused(value: object) -> None:
    with pytest.raises(ValueError, match="no MessagePack of a log"):
        decode(msgspec.msgpack.encode(value))


def test_every_prefix_of_a_value_is_refused() -> None:
    data = msgspec.msgpack.encode([["P", "kid.db", 300, [1, 2], b"x" * 300]])
    for end in range(len(data)):
        with pytest.raises(ValueError, match="no MessagePack of a log"):
            decode(data[:end])
    with pytest.raises(ValueError, match="behind the value"):
        decode(data + b"\0")
