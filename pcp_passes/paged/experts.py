# SPDX-License-Identifier: Apache-2.0
"""``pcp::experts``: a mixture-of-experts layer as one row-local op.

A loop over the experts that were hit depends on data, so no token graph can hold it: the op is one node. It has three
forms, which agree within rounding:

============  ==============================  ======================================================================
form          where                           cost
============  ==============================  ======================================================================
``grouped``   CUDA, bf16, capability 9.x and  rows sorted by expert, two grouped products; loads stay on the device
              10.x, widths a multiple of 8
``loaded``    all else, outside a capture     rows sorted by expert, a pair of products per expert in use; reads the
                                              loads of the experts on the host, once a call
``gathered``  all else, inside a capture or   the weights of each row's experts are copied, a bounded number at a
              ``capturable_only``             time: for the few rows of a decode step
============  ==============================  ======================================================================

On a card without the grouped product ``loaded`` makes the host wait once per layer, between pieces too. A
:class:`~pcp_passes.piecewise.sync_check.SyncCheck` says so there: it lets only the CPU read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from pcp_passes.capture_mode import in_capture
from pcp_passes.errors import ConfigError, GraphError
from pcp_passes.host_reads import allowed
from pcp_passes.ir.library import define

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
"""Activations by the names that configurations use."""

GATHERED_BYTES = 256 << 20
"""Bound on the weights that are copied at a time; one pair of matrices is, whatever its size."""

MAX_TURNS = 64
"""Bound on the copies, each with six kernels, that one op may put into a CUDA graph; see :func:`turns`."""

Activation = Callable[[torch.Tensor], torch.Tensor]
Form = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Activation], torch.Tensor]


def _experts(
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    act: str,
) -> torch.Tensor:
    """``hidden [N, H]``, ``top_k_* [N, k]``, ``gate_up [E, 2I, H]``, ``down [E, H, I]`` to ``[N, H]``.

    Each row sums its experts in the order of its own top-k, so the sum does not depend on the other rows.

    On CUDA without a grouped product, and outside a capture, it reads the loads of the experts on the host, which waits
    for the device.

    Raises:
        ConfigError: an unknown activation.
        GraphError: on CUDA, in a capture, without a grouped product: more than :data:`MAX_TURNS` copies of weights.
    """
    if act not in ACTIVATIONS:
        raise ConfigError(f"pcp::experts has no activation {act!r}; required one of {', '.join(ACTIVATIONS)}")
    out = form_of(hidden, gate_up, down)(hidden, top_k_index, gate_up, down, ACTIVATIONS[act])
    return (out * top_k_weights[..., None]).sum(1).to(hidden.dtype)


def form_of(hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> Form:
    """Which form runs here and now; see the module's text."""
    if has_grouped(hidden, gate_up, down):
        return grouped
    return gathered if in_capture(hidden) else loaded


@allowed("the form of a CPU, for a grouped product on the card; without one it is a wait, and a check fails on it")
def loaded(
    hidden: torch.Tensor, top_k_index: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, activation: Activation
) -> torch.Tensor:
    """``[N, k, H]``, unweighted: expert by expert, as many as have rows. Reads their loads on the host.

    Raises:
        ConfigError: an index that is no expert's, which only this form can tell.
    """
    rows, width = top_k_index.shape
    chosen = top_k_index.flatten()
    order = chosen.argsort(stable=True)
    sorted_rows = hidden.index_select(0, order // width)
    out = hidden.new_empty(rows * width, hidden.shape[1])
    start, *ends = _ends(chosen, order, -1, gate_up.shape[0]).tolist()
    if start or ends[-1] != len(chosen):
        raise ConfigError(
            f"pcp::experts found top_k_index from {int(chosen.min())} to {int(chosen.max())}; required 0 to "
            f"{gate_up.shape[0] - 1}, one of the experts in gate_up {list(gate_up.shape)}."
        )
    for expert, end in enumerate(ends):
        if end == start:
            continue
        gate, up = F.linear(sorted_rows[start:end], gate_up[expert]).chunk(2, dim=-1)
        out[start:end] = F.linear(activation(gate) * up, down[expert])
        start = end
    return _unsorted(out, order, top_k_index)


def grouped(
    hidden: torch.Tensor, top_k_index: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, activation: Activation
) -> torch.Tensor:
    """As :func:`loaded`, by PyTorch's grouped product, which takes the loads from the device (bf16)."""
    chosen = top_k_index.flatten()
    order = chosen.argsort(stable=True)
    ends = _ends(chosen, order, 0, gate_up.shape[0])
    product: Any = torch._grouped_mm
    both = product(hidden.index_select(0, order // top_k_index.shape[1]), gate_up.transpose(1, 2), offs=ends)
    gate, up = both.chunk(2, dim=-1)
    return _unsorted(product(activation(gate) * up, down.transpose(1, 2), offs=ends), order, top_k_index)


def gathered(
    hidden: torch.Tensor, top_k_index: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, activation: Activation
) -> torch.Tensor:
    """As :func:`loaded`, with a copy of the weights of each row's experts, at most :data:`GATHERED_BYTES` at a time.

    Raises:
        GraphError: on CUDA, whose graphs hold every turn: more than :data:`MAX_TURNS` of them.
    """
    rows, width = top_k_index.shape
    if hidden.is_cuda:
        require_few_turns(rows, width, gate_up, down)
    chosen = top_k_index.flatten()
    of_row = torch.arange(rows * width, device=chosen.device) // width
    out = hidden.new_empty(rows * width, hidden.shape[1])
    step = _pairs_a_turn(gate_up, down)
    for first in range(0, rows * width, step):
        some = slice(first, first + step)
        given = hidden.index_select(0, of_row[some])[:, :, None]
        gate, up = torch.bmm(gate_up.index_select(0, chosen[some]), given).chunk(2, dim=1)
        out[some] = torch.bmm(down.index_select(0, chosen[some]), activation(gate) * up).squeeze(2)
    return out.view(rows, width, hidden.shape[1])


def has_grouped(hidden: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Whether the grouped product of these runs without the host: elsewhere PyTorch falls back to a loop over loads."""
    return (
        hidden.is_cuda
        and grouped_serves(hidden, *weights)
        and grouped_runs_on(torch.cuda.get_device_capability(hidden.device))
    )


def grouped_runs_on(card: tuple[int, int]) -> bool:
    """Whether cards of this capability have the grouped product: Hopper and the Blackwell of data centres alone."""
    return torch.version.hip is None and card[0] in (9, 10)


def grouped_serves(hidden: torch.Tensor, *weights: torch.Tensor) -> bool:
    """Whether the grouped product takes operands of these dtypes and sizes."""
    return all(x.dtype == torch.bfloat16 for x in (hidden, *weights)) and all(
        w.is_contiguous() and w.shape[1] % 8 == 0 and w.shape[2] % 8 == 0 for w in weights
    )


def turns(pairs: int, gate_up: torch.Tensor, down: torch.Tensor) -> int:
    """Copies that :func:`gathered` makes for so many pairs of a row and one of its experts."""
    return -(-pairs // _pairs_a_turn(gate_up, down))


def most_pairs(gate_up: torch.Tensor, down: torch.Tensor) -> int:
    """The most pairs of a row and one of its experts that a CUDA graph may hold without a grouped product."""
    return MAX_TURNS * _pairs_a_turn(gate_up, down)


def require_few_turns(rows: int, width: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
    """Raises ``GraphError`` where :func:`gathered` of so many rows and experts of each is too long for a graph."""
    count = turns(rows * width, gate_up, down)
    if count > MAX_TURNS:
        raise GraphError(
            f"{rows:,} rows x {width} experts, {_pair_bytes(gate_up, down):,} B of weights each, of which a graph "
            f"copies at most {GATHERED_BYTES:,} B at a time, are {count:,} turns in one graph; required at most "
            f"{MAX_TURNS}.\n"
            f"  next  use graph_mode='piecewise', which runs experts between graphs, or buckets of at most "
            f"{most_pairs(gate_up, down) // width:,} rows"
        )


def _pairs_a_turn(gate_up: torch.Tensor, down: torch.Tensor) -> int:
    return max(1, GATHERED_BYTES // _pair_bytes(gate_up, down))


def _pair_bytes(gate_up: torch.Tensor, down: torch.Tensor) -> int:
    """Of the two matrices of one expert."""
    return (gate_up.shape[1] * gate_up.shape[2] + down.shape[1] * down.shape[2]) * gate_up.element_size()


def _ends(chosen: torch.Tensor, order: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """i32 ``[stop - first]``: behind the last row of each of these experts, once ``chosen`` is sorted by ``order``."""
    experts = torch.arange(first, stop, device=chosen.device, dtype=chosen.dtype)
    # Not bincount, which asks the device for the largest expert.
    return torch.searchsorted(chosen.index_select(0, order), experts, right=True).to(torch.int32)


def _unsorted(rows: torch.Tensor, order: torch.Tensor, top_k_index: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(rows)
    out[order] = rows
    return out.view(*top_k_index.shape, rows.shape[1])


def _experts_fake(hidden: torch.Tensor, *operands: Any) -> torch.Tensor:
    return torch.empty_like(hidden)


experts_op: Any = define(
    "experts(Tensor hidden, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up, Tensor down, str act) -> Tensor",
    _experts,
    _experts_fake,
)
