# SPDX-License-Identifier: Apache-2.0
"""Random sparse-index runs: P ranks, chunks, pages and workspaces change nothing; kernels give what references give.

All of them run under ``make soak``, some under ``make test``. Kernels run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from pcp_kernels.reference import select
from tests.comparator import check_form
from tests.interpreted import Interpreted
from tests.soak import sparse_steps as steps

PROMPTS = range(400)
SELECTIONS = range(180)
CALLS = range(120)
KINDS = ("fused", "tiled", "split")


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Interpreted]:
    child = Interpreted()
    yield child
    child.close()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def check_prompt(seed: int) -> None:
    prompt, way = steps.make_prompt(seed), steps.make_way(seed)
    for number, (wanted, found) in enumerate(zip(steps.run(prompt, steps.Way()), steps.run(prompt, way), strict=True)):
        for one, other in zip(wanted, found, strict=True):
            assert same(one, other), (seed, number, prompt, way)
        check_form(found[0], torch.arange(1, prompt.lengths[number] + 1), prompt.topk)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_no_way_to_run_a_prompt_changes_it() -> None:
    for seed in PROMPTS:
        check_prompt(seed)


@pytest.mark.unit
@pytest.mark.parametrize("seeds", [range(first, 400, 40) for first in range(4)], ids=str)
def test_a_tenth_of_the_prompts(seeds: range) -> None:
    for seed in seeds:
        check_prompt(seed)


@pytest.mark.unit
def test_the_prompts_are_hard_enough() -> None:
    """Of all seeds: most ways shard, chunk and pad; selections are proper subsets; ties decide some of them."""
    ways = [steps.make_way(seed) for seed in PROMPTS]
    prompts = [steps.make_prompt(seed) for seed in PROMPTS[:60]]
    assert sum(way.pcp > 1 for way in ways) > 250 and sum(way.chunk < 64 for way in ways) > 200
    assert sum(way.spare > 0 for way in ways) > 100 and sum(way.decode == "owner" for way in ways) > 100
    assert sum(max(prompt.lengths) > 2 * prompt.topk for prompt in prompts) > 30
    assert {prompt.store for prompt in prompts} == {"fp8", "bf16", "fp16", "fp32"}


@pytest.mark.unit
def test_a_way_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: rows see one key too few; records are taken in another order than slots; padding is written."""
    seeds = (seed for seed in PROMPTS if steps.make_prompt(seed).lengths == (40,))
    prompt = replace(steps.make_prompt(next(seeds)), topk=5, store="fp32")
    way = steps.Way(pcp=4, chunk=17, page=16, spare=2)
    wanted = steps.run(prompt, steps.Way())
    assert all(same(*pair) for pair in zip(wanted[0], steps.run(prompt, way)[0], strict=True))
    original_topk, original_scatter = steps.index_topk_paged, steps.index_scatter

    def early(q, w, cache, table, request, ke, *rest):  # type: ignore[no-untyped-def]
        return original_topk(q, w, cache, table, request, (ke - 1).clamp(min=0), *rest)

    def rolled(cache: torch.Tensor, record: torch.Tensor, slots: torch.Tensor) -> None:
        original_scatter(cache, record.roll(1, 0), slots)

    def padded(cache: torch.Tensor, record: torch.Tensor, slots: torch.Tensor) -> None:
        original_scatter(cache, record, slots)
        original_scatter(cache, record[slots < 0][:1], slots.new_zeros(1))

    for name, broken in (("index_topk_paged", early), ("index_scatter", rolled), ("index_scatter", padded)):
        with monkeypatch.context() as patched:
            patched.setattr(steps, name, broken)
            found = steps.run(prompt, way)
        assert not same(wanted[0][0], found[0][0]), broken.__name__


def check_selection(seed: int, interpreted: Interpreted) -> None:
    found, valid, given = interpreted(steps.one_selection, seed, KINDS[seed % 3])
    wanted = (select.topk_paged if len(given) == 8 else select.topk_rows)(*given)
    assert torch.equal(found, wanted), (seed, KINDS[seed % 3])
    check_form(found, valid, found.shape[1])


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_selections_in_the_interpreter(interpreted: Interpreted) -> None:
    for seed in SELECTIONS:
        check_selection(seed, interpreted)


@pytest.mark.unit
def test_some_selections_in_the_interpreter(interpreted: Interpreted) -> None:
    for seed in SELECTIONS[:6]:
        check_selection(seed, interpreted)


def check_calls(seed: int, interpreted: Interpreted) -> None:
    """Bytes equal; attention, whose sums run in another order, near."""
    wanted = steps.one_of_each(seed)
    found = interpreted(steps.one_of_each, seed)
    for name, outputs in wanted.items():
        for one, other in zip(outputs, found[name], strict=True):
            if name == "mla":
                torch.testing.assert_close(other.double(), one.double(), rtol=2**-6, atol=2**-6)
            else:
                assert same(one, other), (seed, name)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_calls_in_the_interpreter(interpreted: Interpreted) -> None:
    for seed in CALLS:
        check_calls(seed, interpreted)


@pytest.mark.unit
def test_some_calls_in_the_interpreter(interpreted: Interpreted) -> None:
    for seed in CALLS[::15]:
        check_calls(seed, interpreted)
