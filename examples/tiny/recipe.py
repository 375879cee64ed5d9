# SPDX-License-Identifier: Apache-2.0
"""The five phases: their schedules, and what each reads and writes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from pcp_passes.demo.text import Text, python_text
from tiny import block, checkpoint, losses
from tiny.measure import measure
from tiny.model import TinyGlm, tiny_config
from tiny.phases import Balance, Phase, run

Log = dict[str, list[dict[str, float]]]

# Long windows from the first step on: lengthened afterwards, a model stays poor beyond the length that it began with.
SHAPES = ((8, 256), (8, 256), (2, 1024), (8, 256), (8, 256), (2, 1024), (8, 256), (1, 4096))
DENSE = Phase("dense", 800, SHAPES, 1e-2, 4e-4, warmup=50)
INDEXER = Phase("indexer", 100, ((1, 1024),), 5e-3, 5e-4)
SPARSE = Phase("sparse", 40, ((2, 1024),), 4e-4, 1e-4, warmup=10)
DRAFT = Phase("draft", 220, ((4, 384),), 3e-3, 2e-4, warmup=10)
BLOCK = Phase("block", 400, ((4, 384), (4, 384), (1, 1536)), 1e-2, 3e-4, warmup=20)
DRAFT_STEPS = 3


def train_target(folder: Path, text: Text, quick: bool) -> Log:
    """The first four phases; writes `folder`."""
    torch.manual_seed(0)
    model = TinyGlm(tiny_config())
    indexers = [(name, p) for name, p in model.named_parameters() if ".indexer." in name]
    others = [(name, p) for name, p in model.named_parameters() if ".indexer." not in name]
    mtp = [(name, p) for name, p in others if name.startswith("mtp.")]
    balance = Balance(model)
    log = {}
    for phase, parameters, loss, balanced in (
        (DENSE, others, lambda tokens: losses.language(model, tokens, sparse=False), balance),
        (INDEXER, indexers, lambda tokens: losses.indexers(model, tokens), None),
        (SPARSE, others, lambda tokens: losses.language(model, tokens, sparse=True), balance),
        (DRAFT, mtp, lambda tokens: losses.drafting(model, tokens, DRAFT_STEPS), None),
    ):
        log[phase.name] = run(shortened(phase, quick), parameters, text.train, loss, balanced)
    checkpoint.save(model, folder)
    return log


def train_drafter(target: Path, folder: Path, text: Text, quick: bool) -> Log:
    """The last phase, on the target as it was saved, rounding included; writes `folder`."""
    torch.manual_seed(1)
    model = checkpoint.load(target).requires_grad_(False).eval()
    drafter = block.tiny_drafter(model)
    parameters = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
    log = {BLOCK.name: run(shortened(BLOCK, quick), parameters, text.train, partial(block.block_loss, model, drafter))}
    block.save_drafter(drafter, folder)
    return log


def shortened(phase: Phase, quick: bool) -> Phase:
    """`phase`, or two of its steps."""
    return replace(phase, steps=2, shapes=((1, 160),)) if quick else phase


def train(folder: Path, quick: bool, only_block: bool = False) -> None:
    """Writes `tiny-glm-dsa`, `tiny-dspark`, `training.json` and, after a real run, `measured.json` under `folder`."""
    text = python_text()
    target, log = folder / "tiny-glm-dsa", {}
    if not only_block:
        log = train_target(target, text, quick)
    log |= train_drafter(target, folder / "tiny-dspark", text, quick)
    checkpoint.write_json(folder / "training.json", {"text": text.digest} | log)
    if not quick:
        checkpoint.write_json(folder / "measured.json", measure(target, folder / "tiny-dspark"))
