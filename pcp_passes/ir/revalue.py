# SPDX-License-Identifier: Apache-2.0
"""Values of changed nodes, computed anew and remembered by call.

The layers of a decoder repeat their calls, and running one on fake tensors costs the better part of a millisecond: a
call with the same function, arguments and operand types gives a value of the same type.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from pcp_passes.ir import fakes, meta


class Revalue:
    """States the value of a node from its operands' values, in the fake mode of ``like``."""

    def __init__(self, like: object) -> None:
        self._mode = fakes.fake_mode_of(like)
        self._seen: dict[str, Any] = {}

    def __call__(self, node: fx.Node) -> None:
        """Set ``node``'s value to what running it on its operands' values gives."""
        if node.target is operator.getitem:
            meta.set_value(node, meta.value(node.args[0])[node.args[1]])  # type: ignore[arg-type]
            return
        key = self._key(node)
        if key not in self._seen:
            self._seen[key] = self._run(node)
        meta.set_value(node, self._seen[key])

    def _run(self, node: fx.Node) -> Any:
        args: Any = fx.node.map_arg(node.args, meta.value)
        kwargs: Any = fx.node.map_arg(node.kwargs, meta.value)
        if (
            not any(map(meta.holds_tensor, node.all_input_nodes))
            and getattr(node.target, "__module__", "") == "_operator"
        ):
            return node.target(*args, **kwargs)  # type: ignore[operator]
        assert self._mode is not None, "no fake mode: the graph was captured without fake values"
        return fakes.call_on_fakes(self._mode, node.target, args, kwargs)

    def _key(self, node: fx.Node) -> str:
        described = fx.node.map_arg((node.args, node.kwargs), lambda n: _Type(meta.value(n)))  # type: ignore[arg-type, return-value]
        return f"{node.target}{described}"


class _Type:
    """Prints what decides the type of a result."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __repr__(self) -> str:
        found = list(fakes.tensors_in(self.value))
        if not found:
            return f"<{self.value}>"
        return "<" + ";".join(f"{t.dtype}{tuple(t.shape)}{tuple(t.stride())}{t.device.type}" for t in found) + ">"
