"""docs/matrix.md says what the marks say."""

from __future__ import annotations

import matrix


def test_the_matrix_is_made_from_the_marks() -> None:
    assert matrix.PAPER.read_text() == matrix.make(), "run: python tests/matrix.py"
