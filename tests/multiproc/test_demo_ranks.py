# SPDX-License-Identifier: Apache-2.0
"""The demonstration's two ranks as two processes."""

from __future__ import annotations

import pytest

from pcp_passes.demo import tiny

pytest.importorskip("transformers")


def test_two_processes_continue_as_one_rank_does() -> None:
    result = tiny.run_tiny(2, 96, 8, sizes=(1, 2), processes=2)
    assert result.equal
    assert [side.pcp for side in result.sides] == [1, 2]
    assert len(result.sides[1].rows_per_rank) == 2
    assert result.sides[1].bytes > 0
