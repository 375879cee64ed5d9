# SPDX-License-Identifier: Apache-2.0
"""Masks as statements instead of T x T tensors, through transformers' ``AttentionMaskInterface``.

:func:`pcp_mask` answers a request for a plain pattern (causal, sliding window, chunks, bidirectional; no padding, no
packed sequences, no overlay) with a :class:`MaskPattern`, a few integers. Any other request gets the boolean tensor
that ``sdpa`` would get.

What is known about a request, from reading ``transformers.masking_utils`` of 5.19 and 5.24: ``allow_is_causal_skip``
or ``allow_is_bidirectional_skip`` is true only where nothing was laid over the plain pattern; ``local_size`` is the
configuration's ``sliding_window`` or ``attention_chunk_size``. While tracing, every model that builds positions looks
as if it could hold packed sequences; :class:`PackedSequences` is the way to say that it does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

from pcp_passes.errors import ConfigError


@dataclass(frozen=True)
class MaskPattern:
    """A mask that positions state in full: row m sits at key index ``offset + m``.

    Sizes are ``int``, ``SymInt`` while tracing, or an integer tensor for the offset of a static cache.
    """

    q_length: Any
    kv_length: Any
    offset: Any
    """Key index of the first query row: rows in the cache, less those it has dropped."""
    left: int = -1
    """Keys seen before a row's own position; negative means all."""
    right: int = 0
    """Keys seen after it; negative means all."""
    chunk: int = 0
    """Rows and keys see each other only within the same ``chunk`` positions; 0 means no chunks."""

    def positions(self, device: torch.device) -> torch.Tensor:
        """i64 ``[q_length]``, the key index of each query row."""
        rows = torch.arange(self.q_length, device=device)
        return rows if isinstance(self.offset, int) and self.offset == 0 else rows + self.offset

    def dense(self, device: torch.device) -> torch.Tensor:
        """The mask as the tensor ``sdpa`` takes: bool ``[1, 1, q_length, kv_length]``, true where a row sees a key."""
        row = self.positions(device)[:, None]
        key = torch.arange(self.kv_length, device=device)[None, :]
        seen = torch.ones_like(row <= key)
        if self.left >= 0:
            seen = seen & (row - key <= self.left)
        if self.right >= 0:
            seen = seen & (key - row <= self.right)
        if self.chunk:
            seen = seen & (row // self.chunk == key // self.chunk)
        return seen[None, None]


def pcp_mask(
    batch_size: int,
    q_length: Any,
    kv_length: Any,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> MaskPattern | torch.Tensor | None:
    """The mask function of ``"pcp"``: a pattern where one says it all, else what ``sdpa`` gets.

    Arguments are those of ``transformers.masking_utils.sdpa_mask``.
    """
    window = window_of(
        mask_function, local_size, allow_is_causal_skip, allow_is_bidirectional_skip, kwargs.get("config")
    )
    # Chunks count from position 0, so their pattern does not move along with dropped keys.
    moved = not (isinstance(kv_offset, int) and kv_offset == 0)
    if window is not None and not (window[2] and moved) and _all_visible(attention_mask, kv_length, kv_offset):
        left, right, chunk = window
        return MaskPattern(q_length, kv_length, q_offset - kv_offset, left, right, chunk)
    mask: torch.Tensor | None = masking_utils.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        **kwargs,
    )
    return mask


def window_of(
    mask_function: Any, local_size: int | None, causal_skip: bool, bidirectional_skip: bool, config: Any
) -> tuple[int, int, int] | None:
    """``(left, right, chunk)`` of a plain request, or ``None``."""
    if causal_skip and mask_function is masking_utils.causal_mask_function:
        return -1, 0, 0
    if bidirectional_skip and mask_function is masking_utils.bidirectional_mask_function:
        return -1, -1, 0
    if local_size is None:
        return None
    # The function itself is a closure that says nothing under Dynamo; only the configuration tells the two apart.
    slides = local_size == getattr(config, "sliding_window", None)
    chunks = local_size == getattr(config, "attention_chunk_size", None)
    if slides == chunks:
        return None
    if causal_skip:
        return (local_size - 1, 0, 0) if slides else (-1, 0, local_size)
    return (local_size, local_size, 0) if bidirectional_skip and slides else None


def _all_visible(attention_mask: torch.Tensor | None, kv_length: Any, kv_offset: Any) -> bool:
    """Whether no key is padding. A traced mask cannot be read, so it is taken to hide some."""
    if attention_mask is None:
        return True
    if attention_mask.dim() != 2 or is_tracing(attention_mask):
        return False
    return bool(masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset).all())


class PackedSequences:
    """Whether positions may restart within a row, that is, whether one row may hold several sequences.

    transformers looks for restarts in the values of ``position_ids``. Under a tracer there are no values, so it builds
    a T x T mask for every model that has positions, even those it counted up itself. ``excluded`` says that the rows
    of the running call are known to hold one sequence each; it is read by the replacement that :meth:`installed` puts
    in the place of transformers' own search.
    """

    excluded: bool = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make transformers ask this object first, for the length of a ``with`` block.

        Raises:
            ConfigError: this version of transformers has no such search.
        """
        search = getattr(masking_utils, "find_packed_sequence_indices", None)
        if search is None:
            import transformers

            raise ConfigError(
                f"transformers {transformers.__version__} has no masking_utils.find_packed_sequence_indices; required "
                "as in 5.19 to 5.24. Install one of these, or leave the model its own attention."
            )

        def find_packed_sequence_indices(position_ids: torch.Tensor) -> torch.Tensor | None:
            found: torch.Tensor | None = None if PACKED.excluded else search(position_ids)
            return found

        masking_utils.find_packed_sequence_indices = find_packed_sequence_indices
        try:
            yield
        finally:
            masking_utils.find_packed_sequence_indices = search


PACKED = PackedSequences()


def one_sequence_per_row(position_ids: torch.Tensor) -> bool:
    """Whether positions count up by one along each row, so that no row holds several sequences.

    Args:
        position_ids: integer ``[..., T]``. Its values are read, so on a device this waits for it.
    """
    return bool((position_ids.diff(dim=-1) == 1).all())
