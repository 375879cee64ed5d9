# SPDX-License-Identifier: Apache-2.0
"""Whether a captured function reads only memory that stays: its inputs, what the replayer keeps, and what it makes.

Inputs are compared at every replay, but a function reaches more than it is handed: attention inputs of the call that
runs, caches, tensors that something remembers. A graph would go on reading where those lay at the capture. Ops of this
package with Python bodies are looked into; what a compiled artifact does inside itself is not seen.
"""

from __future__ import annotations

import os
from collections.abc import Container
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from pcp_passes.errors import GraphError
from pcp_passes.piecewise.replayer import GraphKey, Tensors, storage_of
from pcp_passes.piecewise.sync_check import own_body, source_of, tensors_in


class Reads(TorchDispatchMode):
    """Around a captured function: notes what it reads and neither was given, nor makes, nor has somebody keep.

    Args:
        inputs: of the function.
        kept: addresses of memory that stays.
    """

    def __init__(self, inputs: Tensors, kept: Container[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.strangers: dict[str, None] = {}
        self._kept = kept
        self._known = set(map(storage_of, inputs))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        for tensor in tensors_in((args, given)):
            place = storage_of(tensor)
            if tensor.numel() and place not in self._known and place not in self._kept:
                file, line = source_of()
                what = f"{tensor.dtype}{list(tensor.shape)} in {func.name()} at {os.path.basename(file)}:{line}"
                self.strangers[what] = None
        below = own_body(func, (args, given))
        if below is None:
            found = func(*args, **given)
        else:
            with self:
                found = func.redispatch(below, *args, **given)
        self._known.update(map(storage_of, tensors_in(found)))
        return found

    def require_none(self, key: GraphKey) -> None:
        """Raises GraphError when there were any."""
        if self.strangers:
            raise GraphError(
                f"{key} would capture reads of memory that nothing keeps: {'; '.join(list(self.strangers)[:4])}.\n"
                "  next  read it from a static buffer, or make it inside the captured function"
            )
