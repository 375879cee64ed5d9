# SPDX-License-Identifier: Apache-2.0
"""Where a body can be cut into pipeline stages, and what crosses: decided before anything is rewritten.

A node belongs to the stage of its decoder layer, which its module path names; between layers, to that of what it reads.
What depends on inputs alone (rotary tables, sizes) or on weights alone belongs to no stage: every stage that reads it
computes it. Views float too, so only results of kernels cross.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from pcp_passes.collectives import is_collective
from pcp_passes.errors import ConfigError, Refusal
from pcp_passes.ir import fakes, meta, rules
from pcp_passes.ir.placements import Replicate, Shard
from pcp_passes.ir.printer import print_node
from pcp_passes.piecewise.cuts import base_of, is_size, is_view, part_of, row_dims, row_symbol

_CALLS = ("call_function", "call_method")


@dataclass(frozen=True)
class Wire:
    """What one stage sends to the next: ``[N, *shape]``, the rows of the call (rank-local ones when sharded)."""

    name: str
    shape: tuple[int, ...]
    """Without the rows."""
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.name} {str(self.dtype).removeprefix('torch.')}[N, {', '.join(map(str, self.shape))}]"


def decoder_layers(graph: fx.Graph) -> tuple[str, ...]:
    """Module paths of the decoder layers in the order they run: ``("body.decoder.layers.0", ...)``.

    They are the members of the list of modules under which the attention ops lie, those without attention included;
    empty where everything with a cache lies in one layer, or paths are not known.
    """
    paths = [meta.module_path(node).split(".") for node in graph.nodes if _uses_cache(node)]
    if not paths:
        return ()
    depth = next((i for i, parts in enumerate(zip(*paths, strict=False)) if len(set(parts)) > 1), None)
    if depth is None or not all(path[depth].isdigit() for path in paths):
        return ()
    prefix = paths[0][:depth]
    everywhere = (meta.module_path(node).split(".") for node in graph.nodes)
    found = (path[depth] for path in everywhere if len(path) > depth and path[:depth] == prefix)
    return tuple(dict.fromkeys(".".join((*prefix, name)) for name in found if name.isdigit()))


def even_layers(count: int, pp: int) -> tuple[int, ...]:
    """Layers of each stage, as even as can be. What is left over goes to the stages in front of the last, from behind:
    the last one has the head and the drafter, and stock vLLM (``get_pp_indices``) divides the same way.

    Raises:
        ConfigError: more stages than layers.
    """
    if pp < 1:
        raise ConfigError(f"pp must be at least 1, found {pp}.")
    if pp > count:
        known = "" if count > 1 else " (layers are the numbered modules under which attention ops lie)"
        raise ConfigError(f"pp={pp} stages need a layer each, and the model has {count}{known}; lower pp.")
    each, left = divmod(count, pp)
    return tuple(each + (pp - 1 - left <= stage < pp - 1) for stage in range(pp))


def require_layers(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """``layers`` when they are a division of ``count`` layers.

    Raises:
        ConfigError: a stage without a layer, or another sum.
    """
    if not layers or min(layers) < 1 or sum(layers) != count:
        raise ConfigError(
            f"layers={tuple(layers)} sums to {sum(layers)}; required a layer or more in each stage and {count} in all"
        )
    return tuple(layers)


class StageCut:
    """Stages of a finished body.

    Attributes:
        symbol: expression of the row count.
        stage_of: stage of each kernel that belongs to one; the output belongs to the last.
        crossing: of each value that crosses, in graph order, the stages that read it.

    Raises:
        ConfigError: ``layers`` is no division of the layers.
        Refusal: the graph writes into tensors, a stage would need what a later one computes or the cache of another,
            or what crosses is not one row per token.
    """

    def __init__(self, graph: fx.Graph, layers: Sequence[int]) -> None:
        paths = decoder_layers(graph)
        require_layers(layers, max(len(paths), 1))
        self.graph, self.count = graph, len(layers)
        self.symbol = row_symbol(graph)
        owners = [stage for stage, number in enumerate(layers) for _ in range(number)]
        self._layers = dict(zip(paths, owners, strict=True)) if len(layers) > 1 else {}
        self.stage_of: dict[fx.Node, int] = {}
        self.crossing: dict[fx.Node, set[int]] = {}
        self._rows: dict[fx.Node, bool] = {}
        self._weights: dict[fx.Node, bool] = {}
        writes = [node for node in graph.nodes if rules.mutated_arguments(node)]
        _refuse("the body writes into tensors; required a functional graph", [(node, "") for node in writes])
        late = [offence for node in graph.nodes for offence in self._visit(node)]
        _refuse("a layer reads what a layer of a later stage computes", late)
        order = {node: place for place, node in enumerate(graph.nodes)}
        self.crossing = dict(sorted(self.crossing.items(), key=lambda item: order[item[0]]))
        odd = [(base, why) for base in self.crossing if (why := self._unfit(base))]
        _refuse("what crosses to another stage is one row per token", odd)

    def reads(self, stage: int) -> list[fx.Node]:
        """What the stage takes of earlier ones."""
        return [base for base, by in self.crossing.items() if stage in by]

    def makes(self, stage: int) -> list[fx.Node]:
        """What the stage computes for later ones."""
        return [base for base in self.crossing if self.stage_of[base] == stage]

    def row_dim(self, base: fx.Node) -> int:
        """The dimension of the rows of what crosses; those in front of it are 1."""
        held = meta.tensor(base)
        assert held is not None, f"%{base.name} crosses and is no tensor"
        return row_dims(held, self.symbol)[0]

    def wire(self, base: fx.Node) -> Wire:
        """What crosses, as the stages exchange it."""
        held = meta.tensor(base)
        assert held is not None, f"%{base.name} crosses and is no tensor"
        return Wire(base.name, tuple(int(size) for size in held.shape[self.row_dim(base) + 1 :]), held.dtype)

    def _visit(self, node: fx.Node) -> list[tuple[fx.Node, str]]:
        """Give a kernel its stage; what it reads of a later one."""
        if node.op in _CALLS and (is_view(node) or is_size(node)):
            return []
        bases = [base_of(n) for n in node.all_input_nodes if meta.holds_tensor(n) and not is_size(n)]
        work = [base for base in bases if part_of(base) in self.stage_of]
        if node.op == "output":
            stage = self.count - 1
        elif node.op not in _CALLS or not (work or self._is_work(node, bases)):
            return []
        else:
            stage = self._stage_of(node, work)
            self.stage_of[node] = stage
        for base in work:
            if self.stage_of[part_of(base)] < stage:
                self.crossing.setdefault(base, set()).add(stage)
                self.stage_of[base] = self.stage_of[part_of(base)]
        return [(node, f"reads %{b.name} of stage {self.stage_of[part_of(b)]}, and is in stage {stage}")
                for b in work if self.stage_of[part_of(b)] > stage]  # fmt: skip

    def _stage_of(self, node: fx.Node, work: list[fx.Node]) -> int:
        path = meta.module_path(node)
        for layer, stage in self._layers.items():
            if path == layer or path.startswith(f"{layer}."):
                return stage
        return max((self.stage_of[part_of(base)] for base in work), default=0)

    def _is_work(self, node: fx.Node, bases: list[fx.Node]) -> bool:
        """Whether a kernel none of whose operands belongs to a stage does: it applies weights to rows, or has
        effects."""
        self._weights[node] = any(_is_parameter(base) or self._weights.get(base, False) for base in bases)
        self._rows[node] = any(base.op == "placeholder" or self._rows.get(base, False) for base in bases)
        return (self._weights[node] and self._rows[node]) or is_collective(node) or _uses_cache(node)

    def _unfit(self, base: fx.Node) -> str:
        held, where = meta.tensor(base), meta.placement(base)
        if isinstance(rules.rule_of(base), rules.CacheWrite):
            return "is a write of a cache that another stage holds: keep the layers that share it in one stage"
        dims = () if held is None else row_dims(held, self.symbol)
        if held is None or len(dims) != 1 or any(map(fakes.has_token_symbol, held.shape[dims[0] + 1 :])):
            return "is no tensor with one dimension of rows"
        if any(size != 1 for size in held.shape[: dims[0]]):
            return "has dimensions in front of its rows"
        if where not in (Shard(dims[0]), Replicate()):
            return f"is {where}; required rows of one rank"
        return ""


def _uses_cache(node: fx.Node) -> bool:
    return isinstance(rules.rule_of(node), (rules.CacheWrite, rules.LocalQuery))


def _is_parameter(node: fx.Node) -> bool:
    owner = node.graph.owning_module
    if node.op != "get_attr" or owner is None:
        return False
    path, _, leaf = str(node.target).rpartition(".")
    return isinstance(getattr(owner.get_submodule(path), leaf, None), nn.Parameter)


def _refuse(rule: str, found: list[tuple[fx.Node, str]]) -> None:
    if not found:
        return
    lines = []
    for node, why in found[:8]:
        where = "  ".join(filter(None, (meta.module_path(node), meta.source_line(node))))
        lines += [("found", f"{print_node(node)} {why}".rstrip()), *([("module", where)] if where else [])]
    more = [("found", f"{len(found) - 8} more")] if len(found) > 8 else []
    raise Refusal(
        f"split-stages: {rule}",
        [*lines, *more, ("next", "choose other layers= for the stages, or run the model with pp=1")],
    )
