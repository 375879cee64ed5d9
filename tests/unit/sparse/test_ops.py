# SPDX-License-Identifier: Apache-2.0
"""The ops of token graphs with sparse attention: values, layouts, bounds, and what they say of their results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from pcp_passes.errors import ConfigError
from pcp_passes.frontends.torch.plan import build_plan
from pcp_passes.sparse import gathered, ops
from tests.comparator import compare_selected, selected_by_definition

pytestmark = pytest.mark.unit
Tensor = torch.Tensor

ROWS, HEADS, SIZE, TOPK = 23, 3, 4, 6


def index_inputs(kind: str, rows: int = ROWS, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    made = [
        torch.randn(size, generator=generator) for size in ((1, rows, HEADS, SIZE), (1, rows, SIZE), (1, rows, HEADS))
    ]
    if kind == "ties":
        made = [one.mul(1.2).round() for one in made]
    if kind == "zeros":
        made[0] = -made[0].abs()
        made[1] = made[1].abs()
    q, k, w = (one.to(dtype) for one in made)
    return q, k, w


def select(q: Tensor, k: Tensor, w: Tensor, positions: Tensor, *layout: Any) -> Tensor:
    found: Tensor = ops.select_keys_op(q, k, w, positions, TOPK, *(layout or ("local",)))
    return found


def dense_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bths,bth->bts", torch.einsum("bthd,bsd->bths", q, k).relu(), w)[0]


@pytest.mark.parametrize("kind", ["plain", "ties", "zeros"])
def test_the_selection_is_that_of_the_formula(kind: str) -> None:
    q, k, w = index_inputs(kind, dtype=torch.float64)
    seen = torch.arange(ROWS) + 1
    scores = dense_scores(q, k, w)
    wanted = selected_by_definition(scores, seen, TOPK)
    found = select(q, k, w, torch.arange(ROWS))[0]
    compare_selected(found, wanted, scores, seen, TOPK, 0.0 if kind == "ties" else 1e-12)
    if kind == "zeros":
        assert found[-1].tolist() == list(range(TOPK)), "of equal scores the smaller index wins"


@pytest.mark.parametrize("pcp", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["plain", "ties", "zeros"])
def test_ranks_select_what_one_rank_does(pcp: int, kind: str) -> None:
    """Byte for byte, keys in global order or rank after rank."""
    q, k, w = index_inputs(kind)
    whole = select(q, k, w, torch.arange(ROWS))
    plan = build_plan(ROWS, pcp, "zigzag")
    gathered_keys = k.index_select(1, plan.rows.flatten())
    for rows in plan.rows:
        mine = (q[:, rows], w[:, rows])
        for layout, keys in (("replicated", k), ("rank_major", gathered_keys)):
            found = select(mine[0], keys, mine[1], rows, layout, plan.restore)
            assert torch.equal(found, whole[:, rows])


def test_a_wrong_layout_is_an_error_or_seen() -> None:
    q, k, w = index_inputs("plain", 24)
    plan = build_plan(24, 2, "zigzag")
    rows = plan.rows[1]
    part = (q[:, rows], k, w[:, rows], rows)
    right = select(*part, "replicated", plan.restore)
    for wrong, reason in (
        (("local",), "24 keys and 12 rows"),
        (("replicated",), "restore is missing"),
        (("local", plan.restore), "restore is given"),
        (("replicated", plan.restore[:20]), "24 keys for 20 tokens"),
        (("row_major", plan.restore), "rank_major"),
        (("rank_major", torch.arange(25)), "for 25 tokens"),
    ):
        with pytest.raises(ConfigError, match=reason):
            select(*part, *wrong)
    # 24 keys can be 12 of each of two ranks: what the sizes allow, the values betray.
    assert not torch.equal(select(*part, "rank_major", plan.restore), right)


def test_operands_that_do_not_fit_are_named() -> None:
    q, k, w = index_inputs("plain")
    with pytest.raises(ConfigError, match=r"weights is \[1, 23, 2\].*positions is \[22\]"):
        select(q, k, w[..., :2], torch.arange(ROWS - 1))
    with pytest.raises(ConfigError, match=r"q is \[1, 2, 5, 7\], required \[B, H, M, 8\]"):
        ops.sparse_attend_op(
            torch.zeros(1, 2, 5, 7), torch.zeros(1, 5, 6), torch.zeros(1, 5, 2), torch.zeros(1, 5, 3).int(), scale=1.0
        )
    with pytest.raises(ConfigError, match=r"indices is torch\.int64"):
        ops.sparse_attend_heads_op(*torch.zeros(3, 1, 2, 5, 4), torch.zeros(1, 5, 3).long(), scale=1.0)


# Attention


def attention_inputs(batch: int = 2, kv: int = HEADS, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    sizes = ((batch, HEADS * 2, 9, SIZE), (batch, kv, 11, SIZE), (batch, kv, 11, 5))
    q, k, v = (torch.randn(size, generator=generator, dtype=dtype) for size in sizes)
    order = torch.rand(batch, 9, 11, generator=generator).argsort(-1)[..., :4]
    indices = order.masked_fill(torch.rand(batch, 9, 4, generator=generator) < 0.3, -1)
    indices[0, 2] = -1  # a row without any key
    return q, k, v, indices.int()


def dense(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
    """Masked softmax over all keys."""
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    seen = torch.zeros(q.shape[0], q.shape[2], k.shape[2] + 1, dtype=torch.bool)
    seen = seen.scatter(2, indices.long() % (k.shape[2] + 1), True)[:, None, :, :-1]
    logits = (q @ k.transpose(2, 3) * scale).masked_fill(~seen, float("-inf"))
    if sinks is not None:
        logits = torch.cat([logits, sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
    weights = logits.softmax(-1).nan_to_num(0.0)[..., : k.shape[2]]
    return weights @ v


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("kv", [1, HEADS])
def test_attention_over_selected_keys(kv: int, sunk: bool) -> None:
    q, k, v, indices = attention_inputs(kv=kv)
    sinks = torch.linspace(-1, 1, q.shape[1], dtype=q.dtype) if sunk else None
    found = ops.sparse_attend_heads_op(q, k, v, indices, scale=0.7, sinks=sinks)
    torch.testing.assert_close(found, dense(q, k, v, indices, 0.7, sinks), rtol=1e-12, atol=1e-12)
    assert not found[0, :, 2].any()
    assert found.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("sunk", [False, True])
def test_attention_over_latents_is_attention_with_one_key_head(sunk: bool) -> None:
    q, k, _, indices = attention_inputs(kv=1)
    sinks = torch.linspace(-1, 1, q.shape[1], dtype=q.dtype) if sunk else None
    latent, rope = k[:, 0].split([3, 1], -1)
    found = ops.sparse_attend_op(q, latent, rope, indices, scale=0.7, sinks=sinks)
    wanted = dense(q, k, latent[:, None], indices, 0.7, sinks)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert found.transpose(1, 2).is_contiguous()


def test_pieces_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, indices = attention_inputs()
    whole = ops.sparse_attend_heads_op(q, k, v, indices, scale=0.7)
    taken: list[int] = []
    logsumexp = torch.logsumexp

    def counted(logits: Tensor, dim: int) -> Tensor:
        taken.append(logits.shape[0])
        return logsumexp(logits, dim=dim)

    monkeypatch.setattr(gathered.torch, "logsumexp", counted)
    monkeypatch.setattr(ops, "WORKSPACE_BYTES", 5000)
    parts = ops.sparse_attend_heads_op(q, k, v, indices, scale=0.7)
    assert max(taken) == 2, "a workspace of two rows takes two at a time"
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-12)


# What PyTorch is told


@pytest.mark.parametrize("name", ["select", "latents", "heads"])
def test_fakes_say_what_runs(name: str) -> None:
    q, k, w = index_inputs("plain")
    aq, ak, av, indices = attention_inputs(dtype=torch.float32)
    restore = torch.arange(ROWS)
    call: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
        "select": (ops.select_keys_op, (q, k, w, torch.arange(ROWS), TOPK, "replicated", restore), {}),
        "latents": (ops.sparse_attend_op, (aq, ak[:, 0, :, :3], ak[:, 0, :, 3:], indices), {"scale": 0.7}),
        "heads": (ops.sparse_attend_heads_op, (aq, ak, av, indices), {"scale": 0.7}),
    }
    op, arguments, options = call[name]
    torch.library.opcheck(op, arguments, options)


def test_flops_count_selected_keys_alone() -> None:
    q, k, v, indices = attention_inputs(batch=1)
    with FlopCounterMode(display=False) as counter:
        ops.sparse_attend_heads_op(q, k, v, indices, scale=0.7)
    assert counter.get_total_flops() == 2 * HEADS * 2 * 9 * 4 * (SIZE + 5)
    iq, ik, w = index_inputs("plain")
    with FlopCounterMode(display=False) as counter:
        select(iq, ik, w, torch.arange(ROWS))
    assert counter.get_total_flops() == 2 * ROWS * ROWS * HEADS * (SIZE + 1)


def test_inductor_compiles_them_for_any_number_of_tokens() -> None:
    def attention(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        chosen = ops.select_keys_op(q * 2, k, w, torch.arange(q.shape[1]), TOPK, "local")
        return ops.sparse_attend_op(q.transpose(1, 2), k[..., :3], k[..., 3:], chosen, scale=0.5) + 1

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=counter)
    for rows in (ROWS, 9):
        made = index_inputs("plain", rows)
        torch.testing.assert_close(compiled(*made), attention(*made), rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 1


def test_the_implementation_is_the_one_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, w = index_inputs("plain")
    expected = select(q, k, w, torch.arange(ROWS))
    monkeypatch.setenv("PCP_KERNELS", "reference")
    assert torch.equal(select(q, k, w, torch.arange(ROWS)), expected)
    for chosen, says in (("refrence", "found 'refrence'; supported: reference"), ("interpreter", "TRITON_INTERPRET")):
        monkeypatch.setenv("PCP_KERNELS", chosen)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        with pytest.raises(ValueError, match=says):
            select(q, k, w, torch.arange(ROWS))
        select(*index_inputs("plain", dtype=torch.float64), torch.arange(ROWS))  # no kernel: always the reference


def test_the_generated_kernels_run_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU that is Triton's interpreter; here the op that would launch it says that it was called."""
    from pcp_kernels import device
    from pcp_kernels.ops import topk

    q, k, w = index_inputs("plain")
    expected = select(q, k, w, torch.arange(ROWS))
    called: list[tuple[int, ...]] = []

    def kernels(*operands: Any) -> Tensor:
        called.append(tuple(operands[0].shape))
        return expected[0]

    monkeypatch.setattr(device, "implementation", lambda tensor: "interpreter")
    monkeypatch.setattr(topk, "index_topk_rows", kernels)
    assert torch.equal(select(q, k, w, torch.arange(ROWS)), expected)
    assert called == [(ROWS, HEADS, SIZE)]
