# SPDX-License-Identifier: Apache-2.0
"""``examples/sparse_index.py``: what it prints, and that it would say so if four ranks selected other keys."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("transformers")
PATH = Path(__file__).resolve().parents[3] / "examples" / "sparse_index.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_sparse_index", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_same_keys_everywhere(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "120 tokens, the best 12 keys of each, 1 of 2 layers with an indexer"
    assert [line.partition(" equal")[0] for line in lines[1:]] == [
        "unlowered and P=1: 120 of 120 rows",
        "unlowered and P=4: 120 of 120 rows",
        "P=1 and P=4: 120 of 120 rows",
    ]
    assert max(float(line.rpartition(" ")[2]) for line in lines[1:]) < 1e-5


def test_other_keys_are_seen(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: each of four ranks sees one key too few. What one rank selects is the test above."""
    original = example.select.topk_rows
    lowered = example.lowered

    def early(q, w, k, scale, ks, ke, *rest, **named):  # type: ignore[no-untyped-def]
        return original(q, w, k, scale, ks, ke - 1, *rest, **named)

    def broken(model, ids, pcp):  # type: ignore[no-untyped-def]
        if pcp == 1:
            return example.unlowered(model, ids)
        monkeypatch.setattr(example.select, "topk_rows", early)
        return lowered(model, ids, pcp)

    monkeypatch.setattr(example, "lowered", broken)
    with pytest.raises(AssertionError, match="ranks select other keys"):
        example.main()
