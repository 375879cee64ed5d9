# SPDX-License-Identifier: Apache-2.0
"""Shared by all tests: settings for small machines, the full-matrix switch, the tiny checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

# Before torch is imported, here and in every process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Workers of pytest-xdist get the size of a terminal; what the command line prints is compared at sizes of its own.
os.environ.pop("COLUMNS", None)
os.environ.pop("LINES", None)

import pytest
import torch

from tests import models

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

TIERS = ("unit", "multiproc", "vllm", "gpu", "soak")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test without a tier takes that of its folder; the CUDA tier is skipped where there is no device."""
    here = Path(__file__).parent
    for item in items:
        if not any(item.get_closest_marker(tier) for tier in TIERS):
            folder = item.path.relative_to(here).parts[0]
            if folder not in TIERS:
                raise pytest.UsageError(f"{item.nodeid}: move it to a folder of, or mark it as, {', '.join(TIERS)}")
            item.add_marker(folder)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def full_matrix() -> bool:
    """Whether the whole matrix is asked for (``PCP_TEST_FULL=1``) instead of its pairwise cover."""
    return os.environ.get("PCP_TEST_FULL", "0") == "1"


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Callable[..., Path]:
    """``tiny_checkpoint(name, seed=0)``: directory of a checkpoint of ``tests.models``, built once."""
    return models.build


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Directory of SmolLM2-135M-Instruct; dequantised on first use, in the folder that the demonstration uses too."""
    from pcp_passes.demo.smollm2 import fetch_smollm2

    return fetch_smollm2(Path(__file__).resolve().parents[1] / "build" / "models")
