# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes of tensors that a piece of code keeps alive at once."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that operations have made and something still holds.

    What existed before does not count, nor does a view of it. What an operation holds inside itself is not seen.

    Attributes:
        peak: the largest sum so far, bytes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        self.live = {key: pair for key, pair in self.live.items() if not pair[0].expired()}
        for held in tree_leaves(out):
            if isinstance(held, torch.Tensor):
                storage = held.untyped_storage()
                if storage._cdata not in given:
                    self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out
