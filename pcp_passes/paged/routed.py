# SPDX-License-Identifier: Apache-2.0
"""Experts of a mesh: what of a row travels to them, and the sums of those that a rank holds.

``pcp::experts`` of :mod:`pcp_passes.paged.experts` has all experts at hand. Over a mesh each rank holds a range of them
(:class:`ExpertShard`, found by layer name on :class:`~pcp_passes.paged.state.PagedCaches`, like its caches), so rows
travel: hidden state, chosen experts and their weights, packed to one record of bytes per row and one collective per
axis. Expert -1 is nobody's: the padded rows of a call are routed to it, and no expert computes for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pcp_passes.capture_mode import in_capture
from pcp_passes.errors import ConfigError
from pcp_passes.host_reads import allowed
from pcp_passes.ir.library import define
from pcp_passes.paged import experts
from pcp_passes.paged.state import current

MASK_ROUTED = "pcp::mask_routed"
PACK_ROUTED = "pcp::pack_routed"
UNPACK_ROUTED = "pcp::unpack_routed"
LOCAL_EXPERTS = "pcp::local_experts"
NOBODY = -1
"""The expert that padded rows are routed to."""

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class ExpertShard:
    """Experts ``[first, first + count)`` of ``total`` of one layer: what one rank of an expert-parallel group holds.

    Raises:
        ConfigError: matrices of different numbers of experts, or a range that is not among ``total``.
    """

    gate_up: torch.Tensor
    """``[count, 2I, H]``."""
    down: torch.Tensor
    """``[count, H, I]``."""
    first: int
    total: int

    def __post_init__(self) -> None:
        found = self.gate_up.shape[0], self.down.shape[0]
        if found[0] != found[1] or not 0 <= self.first <= self.first + found[0] <= self.total:
            raise ConfigError(
                f"an expert shard of {found[0]} gate-up and {found[1]} down matrices from expert {self.first} of "
                f"{self.total}; required as many of both, among the experts of the layer."
            )

    @property
    def count(self) -> int:
        """Experts here; 0 on a rank that none is left for."""
        return self.gate_up.shape[0]


def mask_routed(top_k_index: torch.Tensor) -> torch.Tensor:
    """Experts i64 ``[N, k]`` of the rows of the running call, -1 on its padded rows (those past its last request).

    Raises:
        ConfigError: another number of rows than the call has.
    """
    result: torch.Tensor = mask_routed_op(top_k_index)
    return result


def pack_routed(hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """``[N, H]``, ``[N, k]`` and ``[N, k]`` of any dtypes as bytes, ``u8[N, W]``: one record per row."""
    result: torch.Tensor = pack_routed_op(hidden, top_k_index, top_k_weights)
    return result


def unpack_routed(record: torch.Tensor, layout: str) -> Tensors:
    """What :func:`pack_routed` packed, copied; ``layout`` is :func:`record_layout` of its operands."""
    first, second, third = unpack_routed_op(record, layout)
    return first, second, third


def local_experts(
    hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, layer: str, act: str
) -> torch.Tensor:
    """Of ``pcp::experts`` the sum of the experts that this rank holds, ``[N, H]``; 0 for a row without one here.

    Args:
        hidden: ``[N, H]``.
        top_k_index: integers ``[N, k]``, experts of the whole layer; -1 is not routed.
        top_k_weights: ``[N, k]``.
        layer: name of the experts in ``PagedCaches.experts``.
        act: an activation of :data:`pcp_passes.paged.experts.ACTIVATIONS`.

    Raises:
        ConfigError: the rank has no shard of that layer, an unknown activation, or (where the host may read) an index
            that is no expert's.
    """
    result: torch.Tensor = local_experts_op(hidden, top_k_index, top_k_weights, layer, act)
    return result


def record_layout(*parts: torch.Tensor) -> str:
    """Dtypes and widths of the parts of a record: ``"bfloat16[64] int64[2] float32[2]"``."""
    return " ".join(f"{str(part.dtype).removeprefix('torch.')}[{int(part.shape[1])}]" for part in parts)


def parse_layout(layout: str) -> list[tuple[torch.dtype, int]]:
    """The parts of :func:`record_layout`.

    Raises:
        ConfigError: another text.
    """
    parts: list[tuple[torch.dtype, int]] = []
    for text in layout.split():
        name, _, width = text.removesuffix("]").partition("[")
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype) or not width.isdecimal():
            raise ConfigError(f"{UNPACK_ROUTED}: {text!r} of {layout!r} is no part; required such as 'float32[64]'")
        parts.append((dtype, int(width)))
    if len(parts) != 3:
        raise ConfigError(f"{UNPACK_ROUTED}: {layout!r} has {len(parts)} parts; required hidden, index and weights")
    return parts


def _mask_routed(top_k_index: torch.Tensor) -> torch.Tensor:
    _, inputs = current(MASK_ROUTED)
    if top_k_index.shape[0] != inputs.rows:
        raise ConfigError(
            f"{MASK_ROUTED}: {top_k_index.shape[0]} rows are routed in a call of {inputs.rows}; it must come before "
            "the rows of other ranks do."
        )
    return top_k_index.masked_fill(inputs.padding[:, None], NOBODY)


def _pack_routed(hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.contiguous().view(torch.uint8) for part in (hidden, top_k_index, top_k_weights)], 1)


def _unpack_routed(record: torch.Tensor, layout: str) -> Tensors:
    parts = parse_layout(layout)
    sizes = [dtype.itemsize * width for dtype, width in parts]
    if record.dim() != 2 or record.dtype != torch.uint8 or record.shape[1] != sum(sizes):
        raise ConfigError(
            f"{UNPACK_ROUTED}: found {record.dtype}{list(record.shape)} for {layout!r}; required uint8 "
            f"[N, {sum(sizes)}]"
        )
    # Copies: within a record a part begins at any byte, and a row may be of a width that no view can step over.
    first, second, third = (
        held.clone(memory_format=torch.contiguous_format).view(dtype)
        for held, (dtype, _) in zip(record.split(sizes, 1), parts, strict=True)
    )
    return first, second, third


def _local_experts(
    hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, layer: str, act: str
) -> torch.Tensor:
    caches, _ = current(LOCAL_EXPERTS)
    shard = caches.experts.get(layer)
    if shard is None:
        raise ConfigError(
            f"{LOCAL_EXPERTS}: this rank holds no experts of {layer!r} (it has {sorted(caches.experts) or 'none'}). "
            "Fill PagedCaches.experts with pcp_passes.engine.expert_shards.shard_experts."
        )
    return partial_sum(hidden, top_k_index, top_k_weights, shard, act)


def partial_sum(
    hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, shard: ExpertShard, act: str
) -> torch.Tensor:
    """:func:`local_experts` of a given shard.

    The form is chosen as for ``pcp::experts``. ``loaded`` computes the pairs of a row and an expert that are here, and
    no other. The other two keep their sizes whatever the routing is: ``grouped`` sorts the rest behind its last group,
    ``gathered`` computes them with some expert, and both drop what they give for them.
    """
    if act not in experts.ACTIVATIONS:
        raise ConfigError(
            f"{LOCAL_EXPERTS} has no activation {act!r}; required one of {', '.join(experts.ACTIVATIONS)}"
        )
    if not shard.count:
        return torch.zeros_like(hidden)
    activation = experts.ACTIVATIONS[act]
    own = top_k_index - shard.first
    here = (own >= 0) & (own < shard.count)
    if experts.has_grouped(hidden, shard.gate_up, shard.down):
        last = own.masked_fill(~here, shard.count)
        each = experts.grouped(hidden, last, shard.gate_up, shard.down, activation)
    elif in_capture(hidden):
        each = experts.gathered(hidden, own.masked_fill(~here, 0), shard.gate_up, shard.down, activation)
    else:
        each = _pairs_here(hidden, own, here, shard, activation)
    # Selected and not multiplied by 0: what was dropped, or the weight of a padded row, need not be finite.
    return torch.where(here[..., None], each * top_k_weights[..., None], 0).sum(1).to(hidden.dtype)


@allowed("the form of a CPU, for a grouped product on the card; without one it is a wait, and a check fails on it")
def _pairs_here(
    hidden: torch.Tensor, own: torch.Tensor, here: torch.Tensor, shard: ExpertShard, activation: experts.Activation
) -> torch.Tensor:
    rows, width = own.shape
    least, most = -shard.first + NOBODY, shard.total - shard.first
    if rows and bool(((own < least) | (own >= most)).any()):
        raise ConfigError(
            f"{LOCAL_EXPERTS} found top_k_index from {int(own.min()) + shard.first} to {int(own.max()) + shard.first}; "
            f"required -1 to {shard.total - 1}, one of the layer's experts or none."
        )
    pairs = here.flatten().nonzero().squeeze(1)
    chosen = own.flatten().index_select(0, pairs)[:, None]
    out = hidden.new_zeros(rows * width, hidden.shape[1])
    if len(pairs):
        given = hidden.index_select(0, pairs // width)
        out[pairs] = experts.loaded(given, chosen, shard.gate_up, shard.down, activation).squeeze(1)
    return out.view(rows, width, hidden.shape[1])


def _unpack_routed_fake(record: torch.Tensor, layout: str) -> Tensors:
    first, second, third = (record.new_empty((record.shape[0], w), dtype=d) for d, w in parse_layout(layout))
    return first, second, third


def _pack_routed_fake(*parts: torch.Tensor) -> torch.Tensor:
    width = sum(int(part.shape[1]) * part.element_size() for part in parts)
    return parts[0].new_empty((parts[0].shape[0], width), dtype=torch.uint8)


mask_routed_op: Any = define(
    "mask_routed(Tensor top_k_index) -> Tensor", _mask_routed, lambda top_k_index: torch.empty_like(top_k_index)
)
pack_routed_op: Any = define(
    "pack_routed(Tensor hidden, Tensor top_k_index, Tensor top_k_weights) -> Tensor", _pack_routed, _pack_routed_fake
)
unpack_routed_op: Any = define(
    "unpack_routed(Tensor record, str layout) -> (Tensor, Tensor, Tensor)", _unpack_routed, _unpack_routed_fake
)
local_experts_op: Any = define(
    "local_experts(Tensor hidden, Tensor top_k_index, Tensor top_k_weights, str layer, str act) -> Tensor",
    _local_experts,
    lambda hidden, *rest: torch.empty_like(hidden),
)
