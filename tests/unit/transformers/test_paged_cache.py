# SPDX-License-Identifier: Apache-2.0
"""Ragged batches over the paged cache: chunked prefill and decode against each request run alone.

Measured: clean at most 1.2e-6 of the largest logit (float32); with a planted fault at least 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoConfig

from pcp_passes.errors import ConfigError, PcpError, Refusal
from pcp_passes.frontends.transformers import PagedKVCache, StepInputs, pcp_attention
from tests.unit.transformers.tiny import MODELS, CountOps, build, error, tokens

CLEAN, FAULT = 1e-5, 1e-3
BLOCKS, SIZE = 24, 4
LENGTHS = (13, 2, 26, 9)
SCHEDULE = ((7, 1, 12, 0), (4, 1, 0, 9), (1, 0, 12, 0), (1, 0, 1, 0), (0, 0, 1, 0))
"""New rows of each request, step by step: long prefills in chunks, short ones at once, decode rows in between."""

Change = Callable[[StepInputs], StepInputs]


class Requests:
    """Sequences whose blocks are dealt in shuffled order, and the inputs of each step."""

    def __init__(self, padding: int = 0) -> None:
        self.ids = [tokens(length, seed=r)[0] for r, length in enumerate(LENGTHS)]
        self.done = [0] * len(LENGTHS)
        self.padding = padding
        order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(3))
        width = -(-max(LENGTHS) // SIZE)
        needed = [-(-length // SIZE) for length in LENGTHS]
        self.tables = torch.zeros(len(LENGTHS), width, dtype=torch.int32)
        for r, blocks in enumerate(order[: sum(needed)].split(needed)):
            self.tables[r, : len(blocks)] = blocks.int()

    def step(self, rows: tuple[int, ...]) -> tuple[torch.Tensor, StepInputs]:
        """Token ids ``[1, N]`` and inputs for the next ``rows`` of each request; padding rows at the end."""
        active = [r for r, count in enumerate(rows) if count]
        positions, slots, ids = [], [], []
        for r in active:
            at = torch.arange(self.done[r], self.done[r] + rows[r])
            positions.append(at)
            slots.append(self.tables[r].long()[at // SIZE] * SIZE + at % SIZE)
            ids.append(self.ids[r][at])
            self.done[r] += rows[r]
        pad = torch.zeros(self.padding, dtype=torch.int64)
        inputs = StepInputs(
            slots=torch.cat([*slots, pad - 1]),
            block_tables=self.tables[active],
            query_start_loc=torch.tensor([0, *(rows[r] for r in active)]).cumsum(0).int(),
            seq_lens=torch.tensor([self.done[r] for r in active], dtype=torch.int32),
            positions=torch.cat([*positions, pad]),
        )
        return torch.cat([*ids, pad])[None], inputs


def run(model: Any, cache: PagedKVCache, *, padding: int = 0, change: Change | None = None) -> list[torch.Tensor]:
    """Logits ``[length, vocabulary]`` of each request, collected over the schedule."""
    requests, collected = Requests(padding), [[] for _ in LENGTHS]  # type: ignore[var-annotated]
    with torch.no_grad(), pcp_attention(model):
        for rows in SCHEDULE:
            ids, inputs = requests.step(rows)
            inputs = change(inputs) if change else inputs
            logits = model(ids, **cache.begin_step(inputs)).logits[0]
            parts = logits.split([*(count for count in rows if count), padding])
            for r, part in zip((r for r, count in enumerate(rows) if count), parts, strict=False):
                collected[r].append(part)
    cache.end_step()
    return [torch.cat(parts) for parts in collected]


def worst(model: Any, found: list[torch.Tensor]) -> float:
    with torch.no_grad():
        return max(
            error(logits, model(ids[None], use_cache=False).logits[0])
            for ids, logits in zip(Requests().ids, found, strict=True)
        )


@pytest.mark.parametrize("read", ["auto", "paged", "gathered"])
@pytest.mark.parametrize("name", MODELS)
def test_ragged_chunks_and_decode_equal_each_request_alone(name: str, read: Any) -> None:
    model = build(name)
    cache = PagedKVCache(model.config, BLOCKS, SIZE, read=read)
    with CountOps() as ops:
        found = run(model, cache)
    assert worst(model, found) <= CLEAN
    layers = model.config.num_hidden_layers
    assert ops.calls["pcp::paged_attend"] == ops.calls["pcp::write_cache"] == layers * len(SCHEDULE)


def test_how_auto_reads() -> None:
    assert PagedKVCache(build("llama").config, BLOCKS, SIZE).read == "paged"
    assert PagedKVCache(build("deepseek_v3").config, BLOCKS, SIZE).read == "gathered"


def test_paged_view_is_the_cache_itself() -> None:
    model = build("llama")
    cache = PagedKVCache(model.config, BLOCKS, SIZE)
    run(model, cache)
    _, inputs = Requests().step((3, 0, 0, 0))
    cache.begin_step(inputs)
    key, value = cache.layers[0].update(*torch.randn(2, 1, 2, 3, 16))
    assert key.shape == (1, 2, BLOCKS * SIZE, 16)
    assert key.data_ptr() == cache.layers[0].keys.data_ptr()
    assert value.data_ptr() == cache.layers[0].values.data_ptr()


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "deepseek_v3"])
def test_padding_rows_change_nothing_and_write_nothing(name: str) -> None:
    """Slot -1 with poisoned blocks: what no request owns must stay as it was, and no result may read it."""
    model = build(name)
    plain, padded = (PagedKVCache(model.config, BLOCKS, SIZE) for _ in range(2))
    required = run(model, plain)
    run(model, padded)
    requests = Requests()
    owned = torch.zeros(BLOCKS * SIZE, dtype=torch.bool)
    for r, length in enumerate(LENGTHS):
        at = torch.arange(length)
        owned[requests.tables[r].long()[at // SIZE] * SIZE + at % SIZE] = True
    for layer in padded.layers:
        for blocks in (layer.keys, layer.values):
            blocks.flatten(0, 1)[~owned] = 777.0
            blocks.flatten(0, 1)[owned] = 0.0
    found = run(model, padded, padding=5)
    for logits, clean in zip(found, required, strict=True):
        torch.testing.assert_close(logits, clean, rtol=0, atol=1e-5 * float(clean.abs().max()))
    for layer in padded.layers:
        for blocks in (layer.keys, layer.values):
            assert bool((blocks.flatten(0, 1)[~owned] == 777.0).all())
            assert not bool((blocks.flatten(0, 1)[owned] == 777.0).any())


@pytest.mark.parametrize("name", ["llama", "mistral", "deepseek_v3"])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda i: replace(i, slots=(i.slots + 1) % (BLOCKS * SIZE)), id="slots off by one"),
        pytest.param(lambda i: replace(i, block_tables=i.block_tables.flip(0)), id="block tables swapped"),
        pytest.param(lambda i: replace(i, block_tables=(i.block_tables + 1) % BLOCKS), id="wrong blocks"),
        pytest.param(lambda i: replace(i, positions=i.positions + i.positions.gt(3)), id="positions off by one"),
        pytest.param(lambda i: replace(i, slots=i.slots.where(i.positions != 2, -1)), id="a row not written"),
        pytest.param(lambda i: replace(i, seq_lens=i.seq_lens.clamp(max=8)), id="a short length"),
    ],
)
def test_planted_faults_are_seen(name: str, change: Change) -> None:
    model = build(name)
    found = run(model, PagedKVCache(model.config, BLOCKS, SIZE), change=change)
    assert worst(model, found) > FAULT


def test_cache_of_half_the_width() -> None:
    model = build("llama")
    cache = PagedKVCache(model.config, BLOCKS, SIZE, torch.bfloat16)
    found = run(model, cache)
    assert cache.layers[0].keys.dtype == torch.bfloat16
    assert CLEAN < worst(model, found) < 0.05


def test_size_is_known_after_one_unwritten_row() -> None:
    model = build("llama")
    probe = PagedKVCache(model.config, 1, SIZE)
    one = torch.zeros(1, dtype=torch.int64)
    inputs = StepInputs(one - 1, one[None].int(), torch.tensor([0, 1]), torch.tensor([1]), one)
    with torch.no_grad(), pcp_attention(model):
        model(one[None], **probe.begin_step(inputs))
    assert probe.bytes_per_block == 2 * 2 * SIZE * 2 * 16 * 4  # layers, K and V, rows, heads, head size, bytes
    assert all(not bool(layer.keys.any()) for layer in probe.layers)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss"])
def test_one_graph_serves_every_step(name: str) -> None:
    """The whole step, cache writes included, captured once with dynamic rows, then replayed on the schedule."""
    model, graphs = build(name), []

    def keep(gm: Any, inputs: object) -> Any:
        graphs.append(gm)
        return gm

    cache = PagedKVCache(model.config, BLOCKS, SIZE)
    one = torch.zeros(1, dtype=torch.int64)
    with torch.no_grad(), pcp_attention(model):
        model(one[None], **cache.begin_step(StepInputs(one - 1, one[None], torch.tensor([0, 1]), one + 1, one)))
    cache.end_step()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=keep, fullgraph=True, dynamic=True)

    requests, collected = Requests(), [[] for _ in LENGTHS]  # type: ignore[var-annotated]
    with torch.no_grad(), pcp_attention(model):
        for rows in SCHEDULE:
            ids, inputs = requests.step(rows)
            logits = compiled(ids, **cache.begin_step(inputs)).logits[0]
            counts = [count for count in rows if count]
            for r, part in zip((r for r, count in enumerate(rows) if count), logits.split(counts), strict=True):
                collected[r].append(part)
    assert worst(model, [torch.cat(parts) for parts in collected]) <= CLEAN
    assert len(graphs) <= 2  # one row is its own graph
    assert sum("pcp.write_cache" in str(node.target) for node in graphs[0].graph.nodes) == 2
    assert sum("pcp.paged_attend" in str(node.target) for node in graphs[0].graph.nodes) == 2


def inputs(**change: torch.Tensor) -> StepInputs:
    fields = {
        "slots": torch.tensor([0, 1]),
        "block_tables": torch.tensor([[0, 1]]),
        "query_start_loc": torch.tensor([0, 2]),
        "seq_lens": torch.tensor([2]),
        "positions": torch.tensor([0, 1]),
    }
    return StepInputs(**{**fields, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": torch.tensor([0])}, r"positions is \[1\], required \[2\]"),
        ({"query_start_loc": torch.tensor([0, 1, 2])}, r"query_start_loc is \[3\], required \[2\]"),
        ({"block_tables": torch.tensor([0, 1])}, r"block_tables is \[2\], required \[1, 2\]"),
        ({"slots": torch.tensor([0, 1], dtype=torch.int32)}, "slots is torch.int32, required torch.int64"),
        ({"seq_lens": torch.tensor([2.0])}, "seq_lens is torch.float32, required an integer type"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        inputs(**change)


def test_a_step_that_attention_does_not_get_is_an_error() -> None:
    model = build("llama")
    cache = PagedKVCache(model.config, BLOCKS, SIZE)
    arguments = cache.begin_step(inputs())
    del arguments["pcp_step"]
    with torch.no_grad(), pcp_attention(model), pytest.raises(Refusal, match="other lengths than its mask"):
        model(tokens(2), **arguments)
    with pytest.raises(PcpError, match=r"layer 0 .* did not read it"):
        cache.end_step()
    states = torch.zeros(1, 2, 2, 16)
    cache.begin_step(inputs())
    cache.update(states, states, 0)
    with pytest.raises(PcpError, match=r"layer 0 .* did not read it"):
        cache.update(states, states, 1)
    cache.end_step()


def test_a_step_of_before_is_an_error() -> None:
    model = build("llama")
    cache = PagedKVCache(model.config, BLOCKS, SIZE)
    old = cache.begin_step(inputs())
    cache.begin_step(inputs())
    with torch.no_grad(), pcp_attention(model), pytest.raises(PcpError, match="this step is over"):
        model(tokens(2), **old)


def test_writes_outside_a_step_and_of_other_shapes_are_refused() -> None:
    model = build("llama")
    cache = PagedKVCache(model.config, BLOCKS, SIZE)
    states = torch.zeros(1, 2, 2, 16)
    with pytest.raises(PcpError, match="outside a step"):
        cache.update(states, states, 0)
    cache.begin_step(inputs())
    with pytest.raises(ConfigError, match=r"batch of 2 with 2 rows; required a batch of 1 with the step's 2 rows"):
        cache.update(states.repeat(2, 1, 1, 1), states, 0)
    with pytest.raises(ConfigError, match=r"batch of 1 with 3 rows; required a batch of 1 with the step's 2 rows"):
        cache.update(states[:, :, [0, 1, 1]], states[:, :, [0, 1, 1]], 0)


def test_a_padding_mask_is_refused() -> None:
    model = build("llama")
    cache = PagedKVCache(model.config, BLOCKS, SIZE)
    mask = torch.tensor([[0, 1]])
    with torch.no_grad(), pcp_attention(model), pytest.raises(Refusal, match="by positions alone"):
        model(tokens(2), attention_mask=mask, **cache.begin_step(inputs()))


def test_a_request_longer_than_its_blocks_is_refused() -> None:
    for read in ("paged", "gathered"):
        model = build("llama")
        cache = PagedKVCache(model.config, BLOCKS, SIZE, read=read)  # type: ignore[arg-type]
        arguments = cache.begin_step(inputs(seq_lens=torch.tensor([9])))
        with torch.no_grad(), pcp_attention(model), pytest.raises(ConfigError, match="9 keys"):
            model(tokens(2), **arguments)


def test_models_that_keep_more_than_keys_and_values_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"layers of type linear_attention in Qwen3NextConfig"):
        PagedKVCache(AutoConfig.for_model("qwen3_next"), BLOCKS, SIZE)
    with pytest.raises(ConfigError, match="DeepseekV32Config"):
        PagedKVCache(AutoConfig.for_model("deepseek_v32"), BLOCKS, SIZE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0, 4), "found 0 blocks of 4 rows"), ((4, 0), "found 4 blocks of 0 rows")],
)
def test_sizes_must_be_positive(arguments: tuple[int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PagedKVCache(build("llama").config, *arguments)


def test_unknown_read() -> None:
    with pytest.raises(ConfigError, match="'auto', 'paged' or 'gathered'"):
        PagedKVCache(build("llama").config, 4, 4, read="dense")  # type: ignore[arg-type]


def test_reset_zeroes_blocks_and_keeps_their_addresses() -> None:
    model = build("llama")
    cache = PagedKVCache(model.config, BLOCKS, SIZE)
    run(model, cache)
    address = cache.layers[1].keys.data_ptr()
    assert bool(cache.layers[1].keys.any())
    cache.reset()
    assert not bool(cache.layers[1].keys.any())
    assert cache.layers[1].keys.data_ptr() == address
    assert worst(model, run(model, cache)) <= CLEAN
