# SPDX-License-Identifier: Apache-2.0
"""How much attention each rank of a layout has to do: the pairs of a query and a key that it sees.

``pcp::attend`` visits, for the row at position ``p`` of ``T``, the keys ``max(0, p - left) .. min(T - 1, p + right)``
within its chunk. Worked example, causal, T = 8, P = 2, zigzag: rank 0 holds 0, 1, 6, 7 and sees 1 + 2 + 7 + 8 = 18
pairs, rank 1 holds 2, 3, 4, 5 and sees 3 + 4 + 5 + 6 = 18. Contiguous parts see 10 and 26.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sight:
    """What a query sees, as ``pcp::attend`` is told; ``None`` bounds in ``explicit`` attention, which skips nothing.

    Attributes:
        left, right: keys before and after its own position; negative means all.
        chunk: only within the same chunk of positions; 0 for none.
        explicit: the mask is a tensor, and the op visits every key.
        topk: at most so many of these keys, which an indexer selects; 0 for all.
    """

    left: int = -1
    right: int = -1
    chunk: int = 0
    explicit: bool = False
    topk: int = 0

    def __str__(self) -> str:
        if self.explicit:
            return "all keys, under an explicit mask"
        text = "causal" if self.right == 0 else "all keys" if self.right < 0 else f"{self.right} keys ahead"
        if self.left >= 0:
            text += f", window of {self.left + 1}"
        text += f", chunks of {self.chunk}" if self.chunk else ""
        return text + (f", the best {self.topk:,}" if self.topk else "")

    @property
    def reach(self) -> int:
        """Tokens that have to be kept for later queries; 0 means all."""
        bounds = [self.left + 1 if self.left >= 0 else 0, self.chunk]
        return min((bound for bound in bounds if bound), default=0) if not self.explicit else 0

    def pairs(self, rows: torch.Tensor, tokens: int) -> list[int]:
        """Visited pairs of each rank, for one head and i64[P, M] positions of its rows, padded ones included."""
        if self.explicit:
            return [rows.shape[1] * tokens] * rows.shape[0]
        low = torch.clamp(rows - self.left, min=0) if self.left >= 0 else torch.zeros_like(rows)
        high = torch.clamp(rows + self.right, max=tokens - 1) if self.right >= 0 else torch.full_like(rows, tokens - 1)
        if self.chunk:
            start = rows // self.chunk * self.chunk
            low, high = torch.maximum(low, start), torch.minimum(high, start + self.chunk - 1)
        counts = high - low + 1
        if self.topk:
            counts = counts.clamp(max=self.topk)
        return [int(count) for count in counts.sum(dim=1)]
