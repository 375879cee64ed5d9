# SPDX-License-Identifier: Apache-2.0
"""Who attends over selected rows: the choice, the messages, and what FlashMLA is called with."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from pcp_kernels.reference import pack
from pcp_passes.errors import ConfigError
from pcp_passes.sparse import backends
from pcp_passes.sparse.backends import BACKENDS, Call, FlashMLA, Reference, Request, available, choose, sparse_mla

LATENT, ROPE = 512, 64
CUDA = Request("cuda", torch.bfloat16, torch.bfloat16, 8, LATENT, ROPE)
CPU = replace(CUDA, device="cpu")


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A ``flash_mla`` that refuses what the real one would, computes the formula, and notes its calls."""
    calls: list[tuple[Any, ...]] = []

    def flash_mla_sparse_fwd(q: Any, kv: Any, indices: Any, sm_scale: float, d_v: int = 512, **more: Any) -> Any:
        calls.append((q.clone(), kv, indices.clone(), sm_scale))
        assert q.dtype == kv.dtype == torch.bfloat16 and indices.dtype == torch.int32
        assert q.is_contiguous() and indices.is_contiguous() and kv.stride(-1) == 1
        assert len(q) and len(kv), "a launch of no blocks is an error"
        assert q.shape[1] in (64, 128) and q.shape[2] == kv.shape[2] == 576 and kv.shape[1] == 1
        assert indices.shape[:2] == (q.shape[0], 1) and indices.shape[2] % 128 == 0
        valid = indices[:, 0] >= 0
        rows = kv[indices[:, 0].clamp(min=0).long(), 0].float()
        logits = torch.einsum("thd,tkd->thk", q.float(), rows) * sm_scale
        logits = logits.masked_fill(~valid[:, None], float("-inf"))
        out = torch.einsum("thk,tkd->thd", logits.softmax(-1), rows[..., :d_v])  # NaN in a row without an index
        return out.to(q.dtype), logits.amax(-1), logits.logsumexp(-1)

    module: Any = types.ModuleType("flash_mla")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_mla", None)
    module.flash_mla_sparse_fwd = flash_mla_sparse_fwd
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    return calls


def operands(dtype: torch.dtype = torch.bfloat16, heads: int = 8, keys: int = 20) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(5, heads, LATENT + ROPE, generator=generator).to(dtype)
    rows = torch.randn(40, LATENT + ROPE, generator=generator).to(dtype)
    slots = torch.stack([torch.randperm(40, generator=generator)[:keys] for _ in range(5)]).int()
    slots[1, 7:] = -1
    slots[2, ::2] = -1
    slots[3] = -1
    return q, rows, slots


def formula(q: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, scale: float, latent: int) -> torch.Tensor:
    """Row by row, in float64."""
    out = torch.zeros(*q.shape[:2], latent, dtype=torch.float64)
    for row, chosen in enumerate(slots):
        held = rows[chosen[chosen >= 0].long()].double()
        if len(held):
            out[row] = (q[row].double() @ held.T * scale).softmax(-1) @ held[:, :latent]
    return out


@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_the_reference_is_the_formula(dtype: torch.dtype, atol: float) -> None:
    q, rows, slots = operands(dtype)
    found = sparse_mla(q, rows, slots, 0.05, latent=LATENT, rope=ROPE, workspace_bytes=1 << 20)
    assert found.dtype == dtype and not found[3].any()
    torch.testing.assert_close(found.double(), formula(q, rows, slots, 0.05, LATENT), rtol=0, atol=atol)
    # Sabotage: another scale, and -1 read as the last row, are far away.
    assert (formula(q, rows, slots, 0.06, LATENT) - found).abs().max() > 1e-2
    assert (formula(q, rows, slots.where(slots >= 0, 39), 0.05, LATENT) - found).abs().max() > 1e-2


def test_the_reference_reads_records() -> None:
    q, rows, slots = operands(torch.float32)
    records = pack.latent_pack(rows[:, :LATENT], rows[:, LATENT:], store="fp8")
    assert records.shape == (40, 656)
    held = torch.cat(pack.latent_unpack(records, LATENT, ROPE), dim=1)
    found = sparse_mla(q, records, slots, 0.05, latent=LATENT, rope=ROPE)
    torch.testing.assert_close(found.double(), formula(q, held, slots, 0.05, LATENT), rtol=0, atol=1e-5)
    assert (found.double() - formula(q, rows, slots, 0.05, LATENT)).abs().max() > 1e-3, "nothing was quantised"


@pytest.mark.parametrize("heads, keys", [(8, 20), (64, 40), (70, 33)])
def test_flashmla_gets_what_it_demands(flash: list[tuple[Any, ...]], heads: int, keys: int) -> None:
    q, rows, slots = operands(heads=heads, keys=keys)
    found = FlashMLA().attend(Call(q, rows, slots, 0.05, LATENT, ROPE, 1 << 20))
    [(given, kv, indices, scale)] = flash
    padded = 128 if heads > 64 else 64
    assert given.shape == (5, padded, 576) and torch.equal(given[:, :heads], q) and not given[:, heads:].any()
    assert kv.data_ptr() == rows.data_ptr() and scale == 0.05, "the cache is not copied"
    assert (
        indices.shape == (5, 1, 128) and torch.equal(indices[:, 0, :keys], slots) and (indices[:, 0, keys:] == -1).all()
    )
    assert found.shape == (5, heads, LATENT) and found.dtype == torch.bfloat16
    assert not found[3].any() and not found.isnan().any(), "a row without a slot is 0"
    torch.testing.assert_close(found.double(), formula(q, rows, slots, 0.05, LATENT), rtol=0, atol=2e-2)


@pytest.mark.parametrize("tokens, held, keys", [(0, 40, 20), (5, 0, 20), (5, 40, 0)])
def test_flashmla_is_not_called_for_nothing(flash: list[tuple[Any, ...]], tokens: int, held: int, keys: int) -> None:
    q, rows, slots = operands()
    nothing = slots[:tokens, :keys] if held else torch.full_like(slots, -1)
    found = FlashMLA().attend(Call(q[:tokens], rows[:held], nothing, 0.05, LATENT, ROPE, 1 << 20))
    assert found.shape == (tokens, 8, LATENT) and found.dtype == torch.bfloat16 and not found.any() and not flash


def test_the_fastest_that_can_is_taken(flash: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(BACKENDS) == ["flashmla", "triton", "reference"]
    assert choose(CUDA).name == "flashmla" and choose(CUDA, "reference").name == "reference"
    assert choose(replace(CUDA, rows=torch.uint8)).name == "triton"
    assert choose(replace(CUDA, latent=128)).name == "triton"
    assert choose(replace(CUDA, dtype=torch.float64, rows=torch.float64)).name == "reference"
    assert choose(CPU).name == "reference"
    assert choose(replace(CUDA, heads=128)).name == "flashmla" and choose(replace(CUDA, heads=129)).name == "triton"
    assert choose(replace(CUDA, rows=torch.float16)).name == "reference", "the kernel multiplies one dtype"
    assert choose(replace(CUDA, dtype=torch.float32, rows=torch.uint8)).name == "reference"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (8, 0))
    assert choose(replace(CUDA, rows=torch.uint8)).name == "reference", "this card has no fp8 values"
    assert choose(CUDA).name == "triton" and "capability 9 and 10" in available(CUDA)["flashmla"]
    monkeypatch.setitem(sys.modules, "flash_mla", None)


@pytest.mark.parametrize(
    "request_, backend, says",
    [
        (CPU, "flashmla", r"flashmla: it needs a CUDA device.*triton: it needs a CUDA device"),
        (CPU, "triton", r"Available: reference"),
        (CUDA, "flashmla", r"flashmla: flash_mla is not installed"),
        (
            replace(CUDA, latent=48),
            "triton",
            r"triton: no mla kernel .* latent: found 48; supported: 16, 32, 64, .* 512",
        ),
        (
            replace(CUDA, rows=torch.float64),
            "triton",
            r"triton: no mla kernel .* store: found 'torch.float64'; supported",
        ),
        (CPU, "trition", r"unknown sparse attention back end 'trition'.*Did you mean 'triton'"),
    ],
)
def test_what_cannot_serve_is_refused(request_: Request, backend: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        choose(request_, backend)


def test_operands_that_do_not_fit() -> None:
    q, rows, slots = operands(torch.float32)
    for wrong in ((q[..., :-1], rows, slots), (q, rows[:, 1:], slots), (q, rows, slots[1:]), (q[0], rows, slots)):
        with pytest.raises(ConfigError, match="sparse attention: found queries"):
            sparse_mla(*wrong, 0.05, latent=LATENT, rope=ROPE)


def test_another_back_end_can_be_added(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Reference):
        name: ClassVar[str] = "own"

        def attend(self, call: Call) -> torch.Tensor:
            return super().attend(call) + 1

    monkeypatch.setattr(backends, "BACKENDS", dict(BACKENDS))
    backends.register_backend(Own())
    q, rows, slots = operands(torch.float32)
    assert next(iter(backends.BACKENDS)) == "own"
    assert sparse_mla(q, rows, slots, 0.05, latent=LATENT, rope=ROPE)[3, 0, 0] == 1
    Own.name = "auto"
    with pytest.raises(ConfigError, match="cannot be called 'auto'"):
        backends.register_backend(Own())
