# SPDX-License-Identifier: Apache-2.0
"""``examples/train_tiny.py`` writes what is shipped, and its own forward passes are those of transformers."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from pcp_passes.demo.checkpoints import BLOCK_DRAFTER, TARGET, checkpoint
from pcp_passes.demo.text import held_out_prompts

pytestmark = pytest.mark.unit
pytest.importorskip("transformers")

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture(scope="module")
def tiny() -> Iterator[dict[str, ModuleType]]:
    """Modules of ``examples/tiny``, importable as they are for the script beside that folder."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield {
            name: importlib.import_module(f"tiny.{name}")
            for name in ("block", "checkpoint", "measure", "model", "muon")
        }
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    paths = os.pathsep.join([str(EXAMPLES.parent), str(EXAMPLES.parent / "kernels")])
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "train_tiny.py"), str(folder), "--quick"],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stderr.splitlines()[::2]] == "dense indexer sparse draft block".split()
    return folder


@pytest.mark.parametrize("name", [TARGET, BLOCK_DRAFTER])
def test_it_writes_what_is_shipped(written: Path, name: str) -> None:
    shapes = [
        {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in load_file(folder / "model.safetensors").items()}
        for folder in (written / name, checkpoint(name))
    ]
    assert shapes[0] == shapes[1]
    configs = [json.loads((folder / "config.json").read_text()) for folder in (written / name, checkpoint(name))]
    for config in configs:
        config.pop("transformers_version", None)
    assert configs[0] == configs[1]


def test_the_log_covers_every_phase(written: Path) -> None:
    log = json.loads((written / "training.json").read_text())
    assert log.keys() == {"text", "dense", "indexer", "sparse", "draft", "block"}
    assert [row["step"] for row in log["draft"]] == [1, 2]


@pytest.fixture(scope="module")
def model(tiny: dict[str, ModuleType]) -> torch.nn.Module:
    loaded: torch.nn.Module = tiny["checkpoint"].load(checkpoint(TARGET)).eval()
    return loaded


def test_a_loaded_checkpoint_is_saved_bit_for_bit(
    tiny: dict[str, ModuleType], model: torch.nn.Module, tmp_path: Path
) -> None:
    tiny["checkpoint"].save(model, tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in (checkpoint(TARGET), tmp_path))
    assert before.keys() == after.keys()
    assert [name for name, tensor in before.items() if not torch.equal(tensor, after[name])] == []


@torch.no_grad()
def test_the_trunk_is_that_of_transformers(tiny: dict[str, ModuleType], model: torch.nn.Module) -> None:
    ids = held_out_prompts(2, 300)
    own, theirs = model.logits(tiny["model"].trunk(model, ids)), model.main(ids).logits
    assert torch.allclose(own, theirs, rtol=0, atol=1e-4)
    # Without the selection it is another model: the comparison above does run through the indexers.
    dense = model.logits(tiny["model"].trunk(model, ids, sparse=False))
    assert not torch.allclose(dense, theirs, rtol=0, atol=1e-2)


@torch.no_grad()
def test_drafts_of_all_positions_at_once_are_those_of_one_at_a_time(
    tiny: dict[str, ModuleType], model: torch.nn.Module
) -> None:
    """Column t of step k against a sequence cut off after t, extended by its own k - 1 slots."""
    module, ids, steps = tiny["model"], held_out_prompts(1, 140), 3
    states = module.trunk(model, ids)
    together = module.drafts(model, ids, states, steps, sparse=True)
    for column in (20, 75, 120):
        slots = states[:, : column + 1]
        for step in range(steps):
            one = module.drafts(model, ids[:, : column + 3 + step], padded(slots), 1, sparse=True)[0]
            assert torch.allclose(one[:, column + step], together[step][:, column], rtol=0, atol=1e-4), (column, step)
            slots = torch.cat([slots, one[:, column + step, None]], 1)
    assert not torch.allclose(together[0][:, 20], together[1][:, 20], rtol=0, atol=1e-2)


def padded(slots: torch.Tensor) -> torch.Tensor:
    """One column more, which a single draft step does not read."""
    return torch.cat([slots, torch.zeros_like(slots[:, :1])], 1)


def test_orthogonal_updates(tiny: dict[str, ModuleType]) -> None:
    """Singular values near one, and the same for a matrix alone, turned, or in a stack."""
    stack = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0))
    done = tiny["muon"].orthogonal(stack)
    values = torch.linalg.svdvals(done)
    assert values.min() > 0.5 and values.max() < 1.4
    assert torch.linalg.svdvals(stack).max() > 5
    assert torch.allclose(done[1], tiny["muon"].orthogonal(stack[1]), atol=0.02)
    assert torch.allclose(done[1].mT, tiny["muon"].orthogonal(stack[1].mT), atol=0.02)


@torch.no_grad()
def test_a_block_of_the_training_is_a_block_of_the_module(tiny: dict[str, ModuleType], model: torch.nn.Module) -> None:
    """What the loss counts as accepted at one anchor is what the drafter drafts there on its own."""
    block, measure = tiny["block"], tiny["measure"]
    drafter = measure.load_dspark(
        checkpoint(BLOCK_DRAFTER), model.main.model.embed_tokens.weight, model.main.lm_head.weight
    )
    ids = held_out_prompts(1, 150)
    aux: list[torch.Tensor] = []
    targets = model.logits(tiny["model"].trunk(model, ids, aux=aux)).argmax(-1)[0]
    context = drafter.context_keys_values(tuple(state[0] for state in aux), torch.arange(ids.shape[1]))
    torch.manual_seed(3)
    _, report = block.block_loss(model, drafter, ids)
    torch.manual_seed(3)
    size = drafter.config.block_size
    anchors = 1 + torch.rand(1, ids.shape[1] - size).argsort(1)[0, : ids.shape[1] // 6]
    first = [int(measure.block_drafts(drafter, context, ids[0, a], a)[0]) == int(targets[a]) for a in anchors.tolist()]
    assert report["accepted 1"] == pytest.approx(sum(first) / len(first))
    assert 0 < sum(first) < len(first)
