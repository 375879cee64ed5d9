# SPDX-License-Identifier: Apache-2.0
"""A small decoder with a paged KV cache, shaped like the graphs vLLM gives to a backend.

- ops that write and read the cache of the current *step* (:func:`running`), with a fake and an eager reference body;
- a dense (grouped-query) and a latent (MLA) decoder that call them, captured by a Dynamo backend: dynamic first
  dimension, in-place attention output, parameters as inputs, the layer name hoisted to an input or a string literal;
- a zigzag layout in plain Python, independent of ``pcp_passes.layout``: what each rank runs in one step.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase

from pcp_passes.ir.rules import CacheWrite, LocalQuery, register_rule

BLOCK = 4
PAD_SLOT = -1


class LayerName(OpaqueBase):
    """A layer name that Dynamo hoists to a graph input, as vLLM's does."""

    def __init__(self, value: str) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerName) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        return f"LayerName({self.value!r})", {"LayerName": LayerName}


register_opaque_type(LayerName, typ="value", hoist=True)


@dataclass
class Step:
    """Metadata and caches of one rank (or of the unsharded run) for one step.

    ``slot_mapping`` has one entry per row given to a cache write; ``query_start_loc``, ``seq_lens`` and ``block_table``
    have one row per attention row (two per request under zigzag).
    """

    caches: dict[str, torch.Tensor]
    slot_mapping: torch.Tensor
    query_start_loc: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor


_steps: list[Step] = []


@contextmanager
def running(step: Step) -> Iterator[None]:
    """Ops inside the block use ``step``."""
    _steps.append(step)
    try:
        yield
    finally:
        _steps.pop()


def _write(layer: str, rows: torch.Tensor) -> None:
    step = _steps[-1]
    slots = step.slot_mapping
    assert rows.shape[0] == slots.shape[0], f"{rows.shape[0]} rows for {slots.shape[0]} slots"
    real = slots != PAD_SLOT
    step.caches[layer].index_copy_(0, slots[real], rows.flatten(1)[real])


def _attend(q: torch.Tensor, out: torch.Tensor, layer: str, split: Callable[[torch.Tensor], Any]) -> None:
    """Causal, bottom-right aligned attention of each attention row over its block-table row; padded rows untouched."""
    step = _steps[-1]
    for row, seq_len in enumerate(step.seq_lens):
        a, b = step.query_start_loc[row : row + 2]
        blocks = step.block_table[row, : math.ceil(seq_len / BLOCK)]
        slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[:seq_len]
        k, v = split(step.caches[layer][slots])  # [S, heads, dim]
        repeat = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeat, 1) for x in (k, v))
        scores = torch.einsum("qhd,shd->hqs", q[a:b], k) / math.sqrt(q.shape[-1])
        visible = torch.arange(seq_len)[None] <= torch.arange(seq_len - (b - a), seq_len)[:, None]
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        out[a:b] = torch.einsum("hqs,shd->qhd", weights, v)


def kv_cache_update(key: torch.Tensor, value: torch.Tensor, layer_name: LayerName) -> torch.Tensor:
    _write(layer_name.value, torch.cat([key.flatten(1), value.flatten(1)], 1))
    return key.new_empty(0)


def attention_with_output(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, layer_name: LayerName,
    kv_cache_dummy_dep: torch.Tensor | None = None,
) -> None:  # fmt: skip
    heads, dim = key.shape[1:]

    def split(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rows[:, : heads * dim].unflatten(1, (heads, dim)), rows[:, heads * dim :].unflatten(1, (heads, dim))

    _attend(query, output, layer_name.value, split)


def mla_kv_cache_update(
    kv_c: torch.Tensor, k_pe: torch.Tensor, layer_name: str, kv_cache_dtype: str, k_scale: torch.Tensor
) -> torch.Tensor:
    _write(layer_name, torch.cat([kv_c.flatten(1), k_pe.flatten(1).to(kv_c.dtype)], 1))
    return kv_c.new_empty(0)


def mla_attention_with_output(
    query: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, output: torch.Tensor, layer_name: str,
    kv_cache_dummy_dep: torch.Tensor | None = None,
) -> None:  # fmt: skip
    latent = kv_c.shape[-1]
    _attend(query, output, layer_name, lambda rows: (rows[:, None], rows[:, None, :latent]))


_LIBRARY: Any = torch.library.Library("pcp_toy", "FRAGMENT")


def _register(function: Callable[..., Any], mutates: tuple[str, ...], fake: Callable[..., Any]) -> None:
    """As vLLM registers its own: a library entry with a schema inferred from the annotations."""
    name = function.__name__
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=mutates))
    _LIBRARY.impl(name, function, "CPU")
    torch.library.register_fake(f"pcp_toy::{name}", fake, lib=_LIBRARY)


_register(kv_cache_update, (), lambda key, *rest: key.new_empty(0))
_register(mla_kv_cache_update, (), lambda kv_c, *rest: kv_c.new_empty(0))
_register(attention_with_output, ("output",), lambda *args, **kwargs: None)
_register(mla_attention_with_output, ("output",), lambda *args, **kwargs: None)

ATTENTION_RULE = LocalQuery(query=0, output=3, new_rows=(1, 2), cache_dep="kv_cache_dummy_dep")
register_rule("pcp_toy::kv_cache_update", CacheWrite(rows=(0, 1)))
register_rule("pcp_toy::attention_with_output", ATTENTION_RULE)
register_rule("pcp_toy::mla_kv_cache_update", CacheWrite(rows=(0, 1)))
register_rule("pcp_toy::mla_attention_with_output", ATTENTION_RULE)


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def _rope(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate ``[M, heads, dim]`` by position."""
    half = x.shape[-1] // 2
    frequency = 100.0 ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angle = positions.to(x.dtype)[:, None, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class DenseLayer(nn.Module):
    """Grouped-query attention, then an MLP."""

    hidden, heads, kv_heads, dim = 32, 4, 2, 8
    cache_width = 2 * kv_heads * dim

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.qkv = nn.Linear(self.hidden, (self.heads + 2 * self.kv_heads) * self.dim, bias=False)
        self.o = nn.Linear(self.heads * self.dim, self.hidden, bias=False)
        self.up = nn.Linear(self.hidden, 48, bias=False)
        self.down = nn.Linear(48, self.hidden, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        widths = [self.heads * self.dim, self.kv_heads * self.dim, self.kv_heads * self.dim]
        q, k, v = self.qkv(_norm(x)).split(widths, -1)
        q = _rope(q.view(-1, self.heads, self.dim), positions)
        k = _rope(k.view(-1, self.kv_heads, self.dim), positions)
        v = v.view(-1, self.kv_heads, self.dim)
        output = torch.empty((x.shape[0], self.heads * self.dim), dtype=x.dtype, device=x.device)
        output = output.view(-1, self.heads, self.dim)
        layer = LayerName(self.name)
        dep = torch.ops.pcp_toy.kv_cache_update(k, v, layer)
        torch.ops.pcp_toy.attention_with_output(q, k, v, output, layer, kv_cache_dummy_dep=dep)
        x = x + self.o(output.view(-1, self.heads * self.dim))
        return x + self.down(torch.nn.functional.silu(self.up(_norm(x))))


class LatentLayer(nn.Module):
    """Latent attention in its absorbed form: one shared key of latent and rope part, values are the latent."""

    hidden, heads, latent, rope = 32, 4, 12, 4
    cache_width = latent + rope

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.q = nn.Linear(self.hidden, self.heads * (self.latent + self.rope), bias=False)
        self.kv = nn.Linear(self.hidden, self.latent + self.rope, bias=False)
        self.o = nn.Linear(self.heads * self.latent, self.hidden, bias=False)
        self.register_buffer("k_scale", torch.ones(()))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q = self.q(_norm(x)).view(-1, self.heads, self.latent + self.rope)
        q = torch.cat([q[..., : self.latent], _rope(q[..., self.latent :], positions)], -1)
        kv_c, k_pe = self.kv(_norm(x)).split([self.latent, self.rope], -1)
        k_pe = _rope(k_pe.unsqueeze(1), positions)
        dep = torch.ops.pcp_toy.mla_kv_cache_update(_norm(kv_c), k_pe, self.name, "auto", self.k_scale)
        output = torch.empty((x.shape[0], self.heads, self.latent), dtype=x.dtype, device=x.device)
        torch.ops.pcp_toy.mla_attention_with_output(q, _norm(kv_c), k_pe, output, self.name, kv_cache_dummy_dep=dep)
        return x + self.o(output.view(-1, self.heads * self.latent))


class Decoder(nn.Module):
    """Token ids ``[M]`` and positions ``[M]`` to hidden states ``[M, 32]``."""

    def __init__(self, kind: type[DenseLayer] | type[LatentLayer] = DenseLayer, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, kind.hidden)
        self.layers = nn.ModuleList(kind(f"model.layers.{i}.self_attn.attn") for i in range(layers))
        self.cache_width = kind.cache_width

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, positions)
        return _norm(x)


def decoder(
    kind: type[DenseLayer] | type[LatentLayer] = DenseLayer, layers: int = 2, dtype: torch.dtype = torch.float32
) -> Decoder:
    """A decoder with seeded weights, large enough that attention decides the output."""
    torch.manual_seed(7)
    model = Decoder(kind, layers).requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * (2.0 / parameter.shape[-1]) ** 0.5)
    return model.to(dtype)


@dataclass
class Capture:
    """A captured graph and how to feed it: the inputs Dynamo passes, with the token inputs found by identity."""

    gm: fx.GraphModule
    inputs: list[Any]
    ids: torch.Tensor
    positions: torch.Tensor

    def bind(self, ids: torch.Tensor, positions: torch.Tensor) -> list[Any]:
        """Inputs of the graph for other tokens."""

        def replaced(held: Any) -> Any:
            if held is self.ids or held is self.positions:
                return ids if held is self.ids else positions
            return len(ids) if isinstance(held, int) else held

        return [replaced(held) for held in self.inputs]


def trace(function: Callable[..., Any], *args: torch.Tensor, dynamic: bool = True) -> tuple[fx.GraphModule, list[Any]]:
    """The whole Dynamo graph of a call, first dimension of each argument dynamic, and the inputs it would get."""
    torch._dynamo.reset()
    seen: list[Any] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            seen.extend([gm, list(inputs)])
            raise _CapturedError

        return run

    for arg in args:
        (torch._dynamo.mark_dynamic if dynamic else torch._dynamo.mark_static)(arg, 0)
    with torch.no_grad(), suppress(_CapturedError):
        torch.compile(function, backend=backend, fullgraph=True)(*args)
    return seen[0], seen[1]


class _CapturedError(Exception):
    pass


def capture(model: Decoder, rows: int = 8, dynamic: bool = True) -> Capture:
    """The decoder's graph, as a backend sees it."""
    ids = torch.arange(rows) % 61
    positions = torch.arange(rows) + 100
    gm, inputs = trace(model, ids, positions, dynamic=dynamic)
    return Capture(gm, inputs, ids, positions)


@dataclass(frozen=True)
class Request:
    """``context`` tokens are in the cache already; ``new`` are run in this step."""

    context: int
    new: int


@dataclass
class World:
    """One step of a batch of requests: what the unsharded run gets, and what each of P ranks gets.

    Worked example: one request, 5 new tokens, P = 2. Chunk bounds are 0 1 2 3 5; rank 0 holds chunks 0 and 3 (tokens
    0, 3, 4), rank 1 chunks 1 and 2 (tokens 1, 2), so M = 3 and rank 1 has one padded row::

        rank_rows   [[0, 3, 4], [1, 2, -1]]
        restore     [0, 3, 4, 1, 2]            # global = rank_major[restore]
    """

    requests: Sequence[Request]
    pcp: int
    seed: int = 0
    ids: torch.Tensor = field(init=False)
    positions: torch.Tensor = field(init=False)
    rank_rows: list[list[int]] = field(init=False)
    restore: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        total = sum(r.new for r in self.requests)
        self.ids = torch.randint(0, 61, (total,), generator=generator)
        self.positions = torch.cat([torch.arange(r.context, r.context + r.new) for r in self.requests])
        blocks = [math.ceil((r.context + r.new) / BLOCK) for r in self.requests]
        order = torch.randperm(sum(blocks), generator=generator) + 1  # block 0 stays unused: a stray write shows
        self.blocks = torch.zeros(len(blocks), max(blocks), dtype=torch.long)
        for row, part in enumerate(order.split(blocks)):
            self.blocks[row, : len(part)] = part
        self.slots = torch.cat([
            self.blocks[row, (p := torch.arange(r.context, r.context + r.new)) // BLOCK] * BLOCK + p % BLOCK
            for row, r in enumerate(self.requests)
        ])  # fmt: skip
        self._segments = [list(self._zigzag(rank)) for rank in range(self.pcp)]
        rows = [[base + t for _, base, a, b in s for t in range(a, b)] for s in self._segments]
        self.rank_rows = [r + [-1] * (max(map(len, rows)) - len(r)) for r in rows]
        flat = torch.tensor([row for r in self.rank_rows for row in r])
        self.restore = torch.empty(total, dtype=torch.long)
        self.restore[flat[flat >= 0]] = torch.arange(len(flat))[flat >= 0]

    @property
    def rows(self) -> int:
        """M: rows of each rank, padding included."""
        return len(self.rank_rows[0])

    def _zigzag(self, rank: int) -> Iterator[tuple[int, int, int, int]]:
        """``(request, global row of its first token, first, last + 1)`` of each non-empty segment of a rank."""
        base, parts = 0, 2 * self.pcp
        for index, request in enumerate(self.requests):
            for chunk in (rank, parts - 1 - rank):
                a, b = chunk * request.new // parts, (chunk + 1) * request.new // parts
                if b > a:
                    yield index, base, a, b
            base += request.new

    def caches(self, model: Decoder, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Fresh caches whose context rows are the same random values wherever they are made."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        slots = (int(self.blocks.max()) + 1) * BLOCK
        return {
            layer.name: torch.randn(slots, model.cache_width, generator=generator, dtype=torch.float64).to(dtype)
            for layer in model.layers
        }

    def unsharded(self, model: Decoder, dtype: torch.dtype) -> Step:
        """The step of one rank that runs everything."""
        ends = torch.tensor([r.new for r in self.requests]).cumsum(0).tolist()
        lens = [r.context + r.new for r in self.requests]
        return Step(self.caches(model, dtype), self.slots, [0, *ends], lens, self.blocks)

    def rank_step(self, rank: int, model: Decoder, dtype: torch.dtype) -> Step:
        """The step of one rank: rank-local attention rows, and the rank-major slots of all ranks."""
        flat = torch.tensor([row for r in self.rank_rows for row in r])
        slots = torch.where(flat >= 0, self.slots[flat.clamp_min(0)], PAD_SLOT)
        segments = self._segments[rank]
        starts = torch.tensor([0, *(b - a for *_, a, b in segments)]).cumsum(0).tolist()
        lens = [self.requests[index].context + b for index, _, _, b in segments]
        table = self.blocks[[index for index, *_ in segments]] if segments else self.blocks[:0]
        return Step(self.caches(model, dtype), slots, starts, lens, table)

    def rank_tokens(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and positions of a rank's rows; padded rows are token 0 at position 0."""
        rows = torch.tensor(self.rank_rows[rank])
        real = rows >= 0
        return self.ids[rows.clamp_min(0)] * real, self.positions[rows.clamp_min(0)] * real
