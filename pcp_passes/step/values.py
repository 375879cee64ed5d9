# SPDX-License-Identifier: Apache-2.0
"""Example values of step-program nodes, so that every size is printed, checked and counted."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import fx, nn

from pcp_passes.ir import fakes, meta
from pcp_passes.step import ops
from pcp_passes.step.calls import BodyCall, HeadCall


def state_value(node: fx.Node, root: nn.Module) -> None:
    """Compute the value of a node from those of its operands, and record it."""
    meta.set_aten_value(node, compute_value(node, root))


def compute_value(node: fx.Node, root: nn.Module) -> Any:
    """What the node gives for the values of its operands; ``root`` holds the modules that are called."""
    args: Any = fx.map_arg(node.args, meta.value)
    mode = fakes.fake_mode_of(args)
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        like = args[0]
        if isinstance(module, BodyCall):
            return _under(mode, module.fake, like.shape[0], like)
        assert isinstance(module, HeadCall), f"%{node.name} calls neither a body nor a head"
        return _under(mode, partial(like.new_empty, dtype=module.dtype), (like.shape[0], module.vocab_size))
    if isinstance(node.target, ops.StepOp):
        return _under(mode, node.target.fake, *args)
    return meta.compute_value(node)


def _under(mode: Any, function: Any, *args: Any) -> Any:
    assert mode is not None, "a step op whose operands hold no fake tensor"
    return fakes.call_on_fakes(mode, function, args, {})
