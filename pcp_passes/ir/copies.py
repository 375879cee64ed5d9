# SPDX-License-Identifier: Apache-2.0
"""Copying a captured graph, with what Dynamo hangs on it outside ``meta`` (checked against torch 2.13.0).

AOTAutograd takes a graph for Dynamo's own only if ``_param_name_to_source`` is on the module and ``_dynamo_source`` on
every placeholder; without them parameters are no static inputs, and CUDA graphs copy them at each replay.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from pcp_passes.ir import meta

_MODULE_ATTRIBUTES = ("_param_name_to_source", "_source_to_user_stacks", "_backend_id", "compile_subgraph_reason")
_NODE_ATTRIBUTES = ("_dynamo_source",)


def copy_graph_module(gm: fx.GraphModule) -> fx.GraphModule:
    """A module with its own graph, and the same parameters, buffers, submodules and example values."""
    return module_like(gm, copy_graph(gm))


def copy_graph(gm: fx.GraphModule) -> fx.Graph:
    """A copy of the module's graph that shares all example values.

    Dynamo's ``grapharg`` entries are left behind: Dynamo deletes its own after the backend returns, since they keep the
    example inputs alive. Until :func:`module_like` gives it a module of its own, the copy belongs to ``gm``.
    """
    copies: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph(owning_module=gm, tracer_cls=gm.graph._tracer_cls)
    end = graph.output(graph.graph_copy(gm.graph, copies))
    copies[next(iter(reversed(gm.graph.nodes)))] = end
    graph._codegen = gm.graph._codegen
    for captured, own in copies.items():
        meta.carry_over(captured, own)
        for attribute in _NODE_ATTRIBUTES:
            if hasattr(captured, attribute):
                setattr(own, attribute, getattr(captured, attribute))
    return graph


def module_like(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module around ``graph`` that shares what ``gm`` holds."""
    module = fx.GraphModule(gm, graph, class_name=type(gm).__name__)
    module.meta = dict(gm.meta)
    held: dict[str, Any] = gm.__dict__
    for attribute in _MODULE_ATTRIBUTES:
        if attribute in held:
            setattr(module, attribute, held[attribute])
    return module
