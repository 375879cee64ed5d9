# SPDX-License-Identifier: Apache-2.0
"""The captured MTP layer against the same layer run whole, without a cache, by transformers' own eager attention.

All in float64. Measured, relative to the largest hidden state: clean at most 2e-15; with a planted fault at least 0.1.
"""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import save_file

from pcp_passes.engine.bodies import Model, keeping_double
from pcp_passes.errors import ConfigError
from pcp_passes.frontends.transformers import load_mtp
from pcp_passes.frontends.transformers.mtp import MTPLayer, load_layer, read_layer
from pcp_passes.paged import running
from pcp_passes.passes import PassContext
from tests.unit.transformers.steps import Requests, without_gather
from tests.unit.transformers.test_targets import CLEAN, FAULT, LENGTHS, SCHEDULE, TiesByPosition, double, requests
from tests.unit.transformers.tiny import error, randomise, tokens

MODELS = ("glm4_moe", "deepseek_v3", "glm_moe_dsa", "deepseek_v32")
_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@functools.cache
def layer(model_type: str) -> MTPLayer:
    made = MTPLayer(double(model_type))
    kept = {name: held.clone() for name, held in made.state_dict().items() if name.startswith("embed_tokens")}
    randomise(made, seed=7)
    made.load_state_dict(kept, strict=False)
    return made.double().eval()


@functools.cache
def on_disk(model_type: str) -> dict[str, torch.Tensor]:
    """The layer as published checkpoints have it: experts one by one."""
    found: dict[str, torch.Tensor] = {}
    made = layer(model_type)
    for name, held in made.state_dict().items():
        if name.startswith(("embed_tokens", "rotary_emb")):
            continue
        name = f"model.layers.{made.index}.{name.removeprefix('block.')}"
        base, _, leaf = name.rpartition(".")
        if leaf not in _EXPERTS or held.dim() != 3:
            found[name] = held
            continue
        for expert, stacked in enumerate(held):
            for part, rows in zip(_EXPERTS[leaf], stacked.chunk(len(_EXPERTS[leaf])), strict=True):
                found[f"{base}.{expert}.{part}.weight"] = rows.contiguous()
    return found


@functools.cache
def drafter(model_type: str, share_topk: bool = False) -> Model:
    return load_mtp(double(model_type), on_disk(model_type), ctx=PassContext(2), share_topk=share_topk)


def states(length: int, seed: int) -> torch.Tensor:
    return torch.randn(length, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(model_type: str, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """The layer on one sequence, formula by formula, with transformers' eager attention and a mask."""
    made, length = layer(model_type), len(ids)
    made.config._attn_implementation_internal = "eager"
    made.config._experts_implementation_internal = "eager"
    with torch.no_grad(), keeping_double(), TiesByPosition():
        embedded = made.embed_tokens(ids).clone()
        embedded[0] = 0
        x = made.eh_proj(torch.cat([made.enorm(embedded), made.hnorm(hidden)], dim=1))[None]
        mask = torch.full((length, length), float("-inf"), dtype=torch.float64).triu(1)[None, None]
        positions = torch.arange(length)[None]
        out = made.block(x, mask, position_ids=positions, position_embeddings=made.rotary_emb(x, positions))
        return made.shared_head["norm"](out if isinstance(out, torch.Tensor) else out[0])[0]


@pytest.mark.parametrize("model_type", MODELS)
def test_equals_the_layer_run_whole(model_type: str) -> None:
    given = requests()
    hidden = [states(length, r) for r, length in enumerate(LENGTHS)]
    expected = [whole(model_type, ids, held) for ids, held in zip(given.ids, hidden, strict=True)]
    caches, ranks = given.caches(), [given.caches() for _ in range(4)]
    model = drafter(model_type).over(PassContext(4))
    for rows in SCHEDULE:
        step = given.next(rows)
        fed, required = (
            torch.cat([held[r][a:b] for r, (a, b) in zip(step.active, step.spans, strict=True)])
            for held in (hidden, expected)
        )
        assert error(step.run(model.bodies["replicated"], caches, fed, padding=2), required) < CLEAN
        assert error(step.run_sharded(model.bodies["sharded"], ranks, fed), required) < CLEAN


def test_a_missing_gather_is_seen() -> None:
    given = Requests([tokens(23)[0]])
    hidden = states(23, 0)
    ranks = [given.caches() for _ in range(2)]
    body = drafter("glm_moe_dsa").bodies["sharded"]
    found = given.next((23,)).run_sharded(body, ranks, hidden, change=without_gather)
    assert error(found, whole("glm_moe_dsa", given.ids[0], hidden)) > FAULT


def _shared_step(model_type: str, forget: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A later draft step with the selection of the step before: the body, and the formula of what it reads."""
    given = Requests([tokens(24)[0]])
    model, made = drafter(model_type, share_topk=True), layer(model_type)
    caches, hidden, first = given.caches(), states(24, 3), given.next((23,))
    inputs = first.inputs()
    with torch.no_grad(), running(caches, inputs):
        _, topk = model.bodies["replicated"](first.ids, inputs.positions, hidden[:23])
    assert topk.shape == (23, made.config.index_topk) and topk.dtype == torch.int32
    later = given.next((1,))
    inputs = later.inputs()
    kept = caches.tensors["drafter.0.index"].clone()
    with torch.no_grad(), running(caches, inputs):
        found = model.bodies["replicated_shared"](later.ids, inputs.positions, hidden[23:], topk[-1:])
    assert torch.equal(caches.tensors["drafter.0.index"], kept), "a step without an indexer wrote index keys"
    seen = sorted({*topk[-1].tolist(), *([] if forget else [23])})
    mask = torch.full((24, 24), float("-inf"), dtype=torch.float64).triu(1)
    mask[23] = float("-inf")
    mask[23, seen] = 0.0
    made.config._attn_implementation_internal = "eager"
    indexer = made.block.self_attn.indexer
    wide = torch.arange(24, dtype=torch.int32).expand(1, 24, 24)
    indexer.forward = lambda *args, **kwargs: wide  # the mask alone selects
    try:
        with torch.no_grad(), keeping_double():
            embedded = made.embed_tokens(given.ids[0]).clone()
            embedded[0] = 0
            x = made.eh_proj(torch.cat([made.enorm(embedded), made.hnorm(hidden)], dim=1))[None]
            positions = torch.arange(24)[None]
            rope = made.rotary_emb(x, positions)
            out = made.block(x, mask[None, None], position_ids=positions, position_embeddings=rope)
            required = made.shared_head["norm"](out if isinstance(out, torch.Tensor) else out[0])[0, 23:]
    finally:
        del indexer.forward
    return found, required


@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "deepseek_v32"])
def test_a_shared_selection_sees_its_own_position(model_type: str) -> None:
    assert error(*_shared_step(model_type, forget=False)) < CLEAN
    assert error(*_shared_step(model_type, forget=True)) > FAULT


def test_the_returned_selection_is_the_indexers() -> None:
    """A row with fewer keys than k sees all of them; the list ends with -1."""
    given = Requests([tokens(3)[0]])
    step = given.next((3,))
    inputs = step.inputs()
    with torch.no_grad(), running(given.caches(), inputs):
        _, topk = drafter("glm_moe_dsa", share_topk=True).bodies["replicated"](step.ids, inputs.positions, states(3, 0))
    assert topk.tolist() == [[0, -1, -1, -1, -1], [0, 1, -1, -1, -1], [0, 1, 2, -1, -1]]


def test_the_embedding_at_position_0_is_zero() -> None:
    """Any token gives the same state there, and another state elsewhere."""
    body = drafter("deepseek_v3").bodies["replicated"]
    given = Requests([tokens(6)[0]])
    step = given.next((6,))
    first = step.run(body, given.caches(), states(6, 1))
    step.ids = step.ids.clone()
    step.ids[0] = (step.ids[0] + 1) % 64
    assert torch.equal(step.run(body, given.caches(), states(6, 1)), first)
    step.ids[1] = (step.ids[1] + 1) % 64
    assert error(step.run(body, given.caches(), states(6, 1))[1:], first[1:]) > FAULT


def test_a_checkpoint_is_read_from_its_folder(tmp_path: Path) -> None:
    held = on_disk("glm_moe_dsa")
    save_file({**held, "model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    found = read_layer(tmp_path, 3)
    assert found.keys() == held.keys()
    filled = MTPLayer(double("glm_moe_dsa")).double()
    load_layer(filled, found)
    required = layer("glm_moe_dsa").state_dict()
    assert all(torch.equal(held, required[name]) for name, held in filled.state_dict().items())
    with pytest.raises(ConfigError, match=r"holds no tensor model.layers.9"):
        read_layer(tmp_path, 9)


def test_tensors_that_do_not_fit_are_all_named() -> None:
    held = dict(on_disk("glm_moe_dsa"))
    del held["model.layers.3.hnorm.weight"], held["model.layers.3.mlp.experts.1.up_proj.weight"]
    held["model.layers.3.surplus"] = torch.ones(1)
    with pytest.raises(ConfigError, match=r"hnorm.weight \[32\].*gate_up_proj.*not read .*surplus") as caught:
        load_mtp(double("glm_moe_dsa"), held, ctx=PassContext(2))
    assert "enorm" not in str(caught.value)


def test_what_is_not_supported_is_refused() -> None:
    several = copy.copy(double("deepseek_v3"))
    several.config = copy.deepcopy(several.config)
    several.config.num_nextn_predict_layers = 2
    with pytest.raises(ConfigError, match="num_nextn_predict_layers=2; required 1"):
        load_mtp(several, on_disk("deepseek_v3"), ctx=PassContext(2))
    with pytest.raises(ConfigError, match="has none"):
        load_mtp(double("deepseek_v3"), on_disk("deepseek_v3"), ctx=PassContext(2), share_topk=True)
