# SPDX-License-Identifier: Apache-2.0
"""What a step program calls between the bodies: small functions of whole tensors, printed as ``pcp_step.<name>``.

None of them communicates, reads a device value on the host, or has a shape that depends on data. Sizes: ``T`` global
tokens, ``R`` requests, ``L`` rows with logits, ``K`` drafts, ``M`` rows of a rank, ``N`` attention rows of a rank,
``P`` ranks, ``Q`` requests of the pool, ``B`` blocks of a request.

A request that is still prefilling after the step has ``next_prefill >= 0``: its sampled token is dropped, and its
drafts write nothing (their slots are -1, their lengths 0).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from pcp_passes.paged import AttentionInputs
from pcp_passes.speculative.sample import sample
from pcp_passes.speculative.streams import DRAFT
from pcp_passes.speculative.verify import verify as verify_drafts

NAMESPACE = "pcp_step"
PAD_SLOT_ID = -1
Tensors = tuple[torch.Tensor, ...]


class StepOp:
    """A function of a step program: what runs, and the shapes it gives for fake operands."""

    def __init__(self, function: Callable[..., Any], fake: Callable[..., Any] | None) -> None:
        self.function = function
        self.fake = fake or function
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self.__module__ = NAMESPACE  # the namespace under which the printer shows it

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


OPS: dict[str, StepOp] = {}


def step_op(fake: Callable[..., Any] | None = None) -> Callable[[Callable[..., Any]], StepOp]:
    """Register a function; ``fake`` gives the shapes where running it on fake operands would not."""

    def register(function: Callable[..., Any]) -> StepOp:
        made = StepOp(function, fake)
        assert made.__name__ not in OPS, f"two step ops are called {made.__name__}"
        OPS[made.__name__] = made
        return made

    return register


def is_op(node: fx.Node, *ops: StepOp) -> bool:
    """Whether the node calls one of ``ops``."""
    return node.op == "call_function" and node.target in ops


@step_op(lambda x, rows: x.new_empty((*rows.shape, *x.shape[1:])))
def select_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows ``rows`` i64[n] of ``x``: ``[n, ...]``."""
    return x.index_select(0, rows)


def _expand_slots_fake(slots: torch.Tensor, gather_index: torch.Tensor, write_mask: torch.Tensor) -> torch.Tensor:
    return slots.new_empty(gather_index.shape)


@step_op(_expand_slots_fake)
def expand_slots(slots: torch.Tensor, gather_index: torch.Tensor, write_mask: torch.Tensor) -> torch.Tensor:
    """Slots i64[T] of the global tokens as slots i64[P*M] of the gathered rows, -1 where a row is not written."""
    return slots.index_select(0, gather_index).masked_fill_(~write_mask, PAD_SLOT_ID)


def _tables_fake(pool: torch.Tensor, requests: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    return pool.new_empty((requests.shape[0], pool.shape[1]))


@step_op(_tables_fake)
def gather_block_tables(pool: torch.Tensor, requests: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Rows ``requests`` of the pool i32[Q, B], written over the first rows of a buffer whose address never changes."""
    return torch.index_select(pool, 0, requests, out=buffer[: requests.shape[0]])


@step_op(lambda positions, query_start_loc: positions.new_empty((query_start_loc.shape[0] - 1,)))
def row_lengths(positions: torch.Tensor, query_start_loc: torch.Tensor) -> torch.Tensor:
    """Cached keys i64[N] of each attention row: the position of its last token + 1; 0 for a row without tokens.

    Read from the device's positions: the host's cursor runs ahead of them after a rejection.
    """
    ends, begins = query_start_loc[1:], query_start_loc[:-1]
    lengths = positions.index_select(0, (ends - 1).clamp_min(0)) + 1
    return lengths.masked_fill(ends == begins, 0)


@step_op()
def attention_inputs(
    slots: torch.Tensor,
    slot_layout: str,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    positions: torch.Tensor,
    per_request: int = 0,
) -> AttentionInputs:
    """What the attention family of one body call reads; ``slot_layout`` says what the slots list, never their count.

    ``per_request`` says of which count of the step the rows are: 0 its tokens, ``w`` as many per request.
    """
    return AttentionInputs(
        slots=slots,
        slot_layout=slot_layout,  # type: ignore[arg-type]
        block_tables=block_tables,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        positions=positions,
        per_request=per_request,
    )


def _verify_fake(logits: torch.Tensor, cu_logits: torch.Tensor, draft_ids: torch.Tensor, *rest: Any) -> Tensors:
    requests, drafts = draft_ids.shape
    return draft_ids.new_empty((requests, drafts + 1)), draft_ids.new_empty((requests,))


@step_op(_verify_fake)
def verify(
    logits: torch.Tensor,
    cu_logits: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_logits: torch.Tensor | None,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> Tensors:
    """Sampled tokens i64[R, K+1] (-1 padded) and accepted drafts i64[R] (:mod:`pcp_passes.speculative.verify`)."""
    return verify_drafts(logits, cu_logits, draft_ids, draft_logits, temperature, seeds, positions)


def _outcome_fake(sampled: torch.Tensor, accepted: torch.Tensor, *rest: Any) -> Tensors:
    like = accepted.new_empty(accepted.shape)
    return sampled.new_empty(sampled.shape), like, like.clone(), like.clone()


@step_op(_outcome_fake)
def outcome(
    sampled: torch.Tensor, accepted: torch.Tensor, cu_logits: torch.Tensor, next_prefill: torch.Tensor
) -> Tensors:
    """What a step did for each request: ``(sampled i64[R, K+1], num_sampled, num_rejected, next_token)``, i64[R] each.

    ``next_token`` is the last sampled token, or the next prompt token of a request that is still prefilling.
    """
    prefilling = next_prefill >= 0
    num_rejected = cu_logits.diff() - 1 - accepted
    last = sampled.gather(1, accepted[:, None]).squeeze(1)
    return (
        sampled.masked_fill(prefilling[:, None], -1),
        (accepted + 1).masked_fill(prefilling, 0),
        num_rejected,
        torch.where(prefilling, next_prefill, last),
    )


@step_op(lambda logits, cu_logits, sampled: sampled.new_empty(sampled.shape, dtype=torch.float64))
def sampled_logprobs(logits: torch.Tensor, cu_logits: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
    """Log probabilities f64[R, K+1] (natural, temperature 1) of the sampled tokens; 0 where there is none."""
    columns = torch.arange(sampled.shape[1], device=sampled.device)
    rows = (cu_logits[:-1, None] + columns).clamp_max(logits.shape[0] - 1)
    known = logits.double().log_softmax(-1)
    return known[rows, sampled.clamp_min(0)].masked_fill_(sampled < 0, 0.0)


@step_op(lambda cu_logits, num_rejected: num_rejected.new_empty(num_rejected.shape))
def last_valid(cu_logits: torch.Tensor, num_rejected: torch.Tensor) -> torch.Tensor:
    """Of the rows with logits, the last valid one of each request, i64[R]: its last row less the rejected drafts."""
    return cu_logits[1:] - 1 - num_rejected


@step_op(lambda ids, *rest: ids.new_empty(ids.shape))
def shift(
    ids: torch.Tensor, query_start_loc: torch.Tensor, last_rows: torch.Tensor, next_token: torch.Tensor
) -> torch.Tensor:
    """Token after each token, i64[T], in *global* order: at a shard's edge that is another rank's token.

    A request's last valid row gets ``next_token``. Rows behind it belong to rejected drafts; what they write is written
    again before it is read.
    """
    ends = query_start_loc[1:] - 1
    following = ids.roll(-1).index_copy_(0, ends, ids.index_select(0, ends))
    return following.index_copy_(0, last_rows, next_token)


@step_op(lambda x, rows, buffer: buffer.new_empty(buffer.shape))
def shard_into(x: torch.Tensor, rows: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a global value, written over ``buffer`` [M], which the target's body has already read."""
    return torch.index_select(x, 0, rows, out=buffer)


@step_op(lambda logits, *rest: logits.new_empty((logits.shape[0],), dtype=torch.int64))
def sample_draft(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Draft tokens i64[n] from logits ``[n, V]``, each from the stream of its request and position."""
    return sample(logits, temperature, seeds, positions, DRAFT)


@step_op(lambda positions, offset: positions.new_empty(positions.shape))
def advance(positions: torch.Tensor, offset: int) -> torch.Tensor:
    """``positions + offset``."""
    return positions + offset


def _query_fake(tables: torch.Tensor, positions: torch.Tensor, num_sampled: torch.Tensor, width: int, *_: Any) -> Any:
    requests = positions.shape[0]
    starts = positions.new_empty((requests + 1,))
    rows = positions.new_empty((requests * width,))
    return rows, starts, positions.new_empty(positions.shape), rows.clone()


@step_op(_query_fake)
def draft_query(
    tables: torch.Tensor, positions: torch.Tensor, num_sampled: torch.Tensor, width: int, caches: Any
) -> Tensors:
    """A replicated query of ``width`` rows per request that begins at ``positions`` i64[R].

    Slots come from block tables i32[R, B] in *global* order. A request that drafts nothing (``num_sampled`` 0), or
    whose query runs past its blocks, writes nothing and sees nothing.

    Returns ``(slots i64[R*width], query_start_loc i64[R+1], seq_lens i64[R], positions i64[R*width])``.
    """
    requests, columns = tables.shape
    block_size = caches.block_size
    steps = torch.arange(width, device=positions.device)
    where = positions[:, None] + steps
    column = torch.div(where, block_size, rounding_mode="floor")
    block = tables.gather(1, column.clamp_max(columns - 1)).to(torch.int64)
    written = ((column < columns) & (block >= 0)).all(1, keepdim=True) & (num_sampled > 0)[:, None]
    slots = torch.where(written, block * block_size + where % block_size, PAD_SLOT_ID)
    starts = torch.arange(requests + 1, device=positions.device) * width
    lengths = (positions + width).masked_fill(~written.squeeze(1), 0)
    return slots.flatten(), starts, lengths, where.flatten()


@step_op()
def stack_drafts(drafts: list[torch.Tensor]) -> torch.Tensor:
    """One column per draft: ``[R]`` each to ``[R, K]``, or ``[R, V]`` each to ``[R, K, V]``."""
    return torch.stack(drafts, 1)


@step_op()
def join_rows(parts: list[torch.Tensor]) -> torch.Tensor:
    """``[T, H]`` each side by side: ``[T, n * H]``."""
    return torch.cat(parts, 1)


@step_op(lambda like, columns: like.new_empty((like.shape[0], columns)))
def no_drafts(like: torch.Tensor, columns: int) -> torch.Tensor:
    """``i64[R, columns]`` of -1: a step without a drafter."""
    return like.new_full((like.shape[0], columns), -1)


@step_op(lambda x, index, width: x.new_empty((x.shape[0] // width, *x.shape[1:])))
def every_row(x: torch.Tensor, index: int, width: int) -> torch.Tensor:
    """Row ``index`` of each group of ``width`` rows."""
    return x[index::width]


@step_op(lambda next_token, mask_token, width: next_token.new_empty((next_token.shape[0] * width,)))
def block_query(next_token: torch.Tensor, mask_token: int, width: int) -> torch.Tensor:
    """Ids i64[R*width] of a block drafter's query: the anchor of each request, then mask tokens."""
    ids = next_token.new_full((next_token.shape[0], width), mask_token)
    ids[:, 0] = next_token
    return ids.flatten()


@step_op()
def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``x + y``."""
    return x + y


@step_op(lambda sampled, accepted: sampled.new_empty((sampled.shape[0], sampled.shape[1] + 1)))
def pack_verified(sampled: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    """Sampled tokens and accepted counts side by side, i64[R, K+2]: they travel together."""
    return torch.cat([sampled, accepted[:, None]], 1)


@step_op(lambda packed: (packed.new_empty((packed.shape[0], packed.shape[1] - 1)), packed[:, 0].clone()))
def unpack_verified(packed: torch.Tensor) -> Tensors:
    """The two parts of :func:`pack_verified`."""
    return packed[:, :-1], packed[:, -1]


@step_op(lambda gathered, like: like.new_empty(like.shape))
def of_rank_0(gathered: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The rows that rank 0 brought to a gather of ``like``: a broadcast, by the one collective there is."""
    return gathered[: like.shape[0]]


@step_op()
def contiguous(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself where its rows lie one after another, as a collective needs them."""
    return x.contiguous()
