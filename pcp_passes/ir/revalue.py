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
        key = call_key(node)
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


def call_key(node: fx.Node) -> str:
    """The call with its operands described by the types of what they hold, not by who made them."""
    described = fx.node.map_arg((node.args, node.kwargs), lambda n: f"<{type_key(meta.value(n))}>")
    return f"{node.op} {node.target} {described}"


def type_key(value: object) -> str:
    """What decides the type of a result: of tensors shape, dtype, device and strides; of anything else the value."""
    found = [f"{t.dtype}{tuple(t.shape)}{tuple(t.stride())}{t.device.type}" for t in fakes.tensors_in(value)]
    return ";".join(found) or str(value)
