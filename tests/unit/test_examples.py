# SPDX-License-Identifier: Apache-2.0
"""The examples run as a reader would run them. The one that starts an engine runs under ``make examples`` only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python on the examples, with the repository importable as an installed package would be."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(ROOT / "examples")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_there_are_examples() -> None:
    assert {path.stem for path in EXAMPLES} >= {"plan_a_batch", "rewrite_and_simulate", "vllm_offline"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_short_and_have_a_main(path: Path) -> None:
    source = path.read_text()
    assert source.count("\n") < 80
    assert "\ndef main(" in source
    assert 'if __name__ == "__main__":' in source


def test_plan_a_batch() -> None:
    done = python(str(ROOT / "examples/plan_a_batch.py"))
    assert done.returncode == 0, done.stderr
    assert "141 tokens, 36 rows on each of 4 ranks" in done.stdout
    assert "sampling gathers 12 rows instead of 144" in done.stdout


def test_rewrite_and_simulate() -> None:
    done = python(str(ROOT / "examples/rewrite_and_simulate.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("pcp.all_gather_rows") == 2
    assert "largest difference from one rank" in done.stdout


# What an example checks, broken: the layout forgets where a row belongs; each rank gathers only its own rows.
BROKEN = {
    "plan_a_batch": (
        "import numpy, dataclasses, plan_a_batch as e; build = e.build_layout;"
        "e.build_layout = lambda *a, **k: (lambda x: dataclasses.replace(x, restore_index=x.restore_index[::-1]))"
        "(build(*a, **k)); e.main()"
    ),
    "rewrite_and_simulate": (
        "import torch, rewrite_and_simulate as e; from pcp_passes import simulate as s;"
        "s._exchange = lambda offers: [tuple(torch.cat([x] * len(offers)) for x in o.operands) for o in offers];"
        "e.main()"
    ),
}


@pytest.mark.parametrize("example", BROKEN)
def test_examples_check_what_they_claim(example: str) -> None:
    done = python("-c", BROKEN[example])
    assert done.returncode != 0
    assert "AssertionError" in done.stderr


def test_vllm_offline_says_when_vllm_is_missing() -> None:
    done = python("-c", "import sys; sys.modules['vllm'] = None; import vllm_offline as e; sys.exit(e.main())")
    assert done.returncode == 0, done.stderr
    assert "not installed: vllm" in done.stdout
