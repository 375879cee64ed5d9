# SPDX-License-Identifier: Apache-2.0
"""What the passes on step programs share: inserting a placed and valued node, and finding inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from pcp_passes.errors import Refusal
from pcp_passes.ir import meta
from pcp_passes.step.placement import result_of
from pcp_passes.step.values import state_value


def insert(before: fx.Node, target: Callable[..., Any], args: tuple[Any, ...], pass_name: str, name: str) -> fx.Node:
    """A new call in front of ``before``, with its value and the placement that follows from its operands."""
    graph = before.graph
    assert graph.owning_module is not None, "a step program belongs to a module"
    with graph.inserting_before(before):
        node = graph.create_node("call_function", target, args, name=name)
    meta.set_created_by(node, pass_name)
    state_value(node, graph.owning_module)
    where = result_of(node)
    assert where is not None, f"{pass_name} made %{node.name} of operands that do not fit"
    meta.set_placement(node, where)
    return node


def after(node: fx.Node) -> fx.Node:
    """The node to insert in front of so that the new one comes right after ``node``."""
    following: fx.Node = node.next
    return following


def given(graph: fx.Graph, name: str) -> fx.Node:
    """The program's input of that name.

    Raises:
        Refusal: the graph is no step program.
    """
    found: fx.Node | None = next((n for n in graph.nodes if n.op == "placeholder" and n.target == name), None)
    if found is None:
        names = [str(n.target) for n in graph.nodes if n.op == "placeholder"]
        raise Refusal(
            "this pass works on a step program, which the graph is not",
            [("found", f"inputs {', '.join(names[:8])}"), ("required", f"an input {name}"),
             ("next", "build a pcp_passes.step.StepProgram; bodies have the pipelines sharded and replicated")],
        )  # fmt: skip
    return found
