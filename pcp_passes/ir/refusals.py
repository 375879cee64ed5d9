# SPDX-License-Identifier: Apache-2.0
"""What a sharded body may not hold. Each function raises one error that names every offender."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from pcp_passes.collectives import is_collective
from pcp_passes.errors import PlacementConflict, Refusal
from pcp_passes.ir import fakes, meta, rules
from pcp_passes.ir.markers import is_marker
from pcp_passes.ir.printer import print_node, type_text

_HIDDEN_WRITE = "no cache write precedes this op: its new keys and values cannot be gathered in front of it"


def refuse_rewritten(graph: fx.Graph) -> None:
    """Raise when the graph already holds our markers or collectives."""
    ours = [node for node in graph.nodes if is_marker(node) or is_collective(node)]
    if ours:
        raise Refusal(
            f"this graph has already been rewritten: it holds {len(ours)} collectives of this package.",
            [
                *(("node", print_node(node)) for node in ours),
                ("next", "give the pipeline the captured graph: build_variants never changes it, so keep that one"),
            ],
        )


def refuse_unruled(
    graph: fx.Graph, pcp: int, axis: str, pass_name: str, shared_cache_layers: frozenset[str] = frozenset()
) -> None:
    """Raise one refusal that names every attention-family op without a rule, and attention that writes its cache."""
    offenders = [(node, why) for node in graph.nodes if (why := rules.why_refused(node))]
    offenders += [(node, _HIDDEN_WRITE) for node in graph.nodes if _writes_inside(node, shared_cache_layers)]
    if not offenders:
        return
    names = sorted({rules.op_name(node) for node, _ in offenders})
    raise Refusal(
        f"{', '.join(names)} cannot run on rows split over {pcp} {axis} ranks.",
        _details(offenders, pass_name)
        + [
            ("next", "register_rule(name, rule) when the op treats rows as a rule says, or shared_cache_layers for a"),
            ("", "layer that reads another layer's cache; else run this model without prefill context parallelism"),
        ],
    )


def refuse_static(graph: fx.Graph, pcp: int, axis: str, pass_name: str) -> None:
    """Raise one refusal that names every cache write whose rows have no token dimension to split."""
    offenders: list[tuple[fx.Node, str]] = []
    for node in graph.nodes:
        rule = rules.rule_of(node)
        if not isinstance(rule, rules.CacheWrite):
            continue
        for position in rule.rows:
            rows = meta.tensor(rules.argument(node, position))
            if rows is None or fakes.token_dim(rows) != 0:
                offenders.append((node, f"operand {position} is {type_text(rows)}: its first size is not symbolic"))
    if offenders:
        raise PlacementConflict(
            f"{len(offenders)} cache-write operands have no token dimension to split over {pcp} {axis} ranks.",
            _details(offenders, pass_name)
            + [("next", "capture with a dynamic token dimension (torch._dynamo.mark_dynamic) and at least two rows:"),
               ("", "a row count of 0 or 1 is always captured as a constant")],
        )  # fmt: skip


def refuse_mixing(graph: fx.Graph, pcp: int, axis: str, pass_name: str) -> None:
    """Raise one refusal that names every op that mixes token rows, as far as shapes and a short op list can tell."""
    offenders = [(node, why) for node in graph.nodes if (why := _mixing(node))]
    if offenders:
        names = sorted({rules.op_name(node) for node, _ in offenders})
        raise PlacementConflict(
            f"{', '.join(names)} mixes tokens, but its input is split over {pcp} {axis} ranks.",
            _details(offenders, pass_name)
            + [("next", "register_rule(name, RowLocal(reason)) if each row is still treated alone; else the model"),
               ("", "cannot be sharded here")],
        )  # fmt: skip


def _writes_inside(node: fx.Node, shared_cache_layers: frozenset[str]) -> bool:
    rule = rules.rule_of(node)
    if not isinstance(rule, rules.LocalQuery) or rule.cache_dep is None:
        return False
    if rules.named_argument(node, rule.cache_dep) is not None or rules.layer_of(node) in shared_cache_layers:
        return False
    return any(rules.argument(node, position) is not None for position in rule.new_rows)


def _mixing(node: fx.Node) -> str | None:
    if node.op not in ("call_function", "call_method") or rules.rule_of(node) is not None:
        return None
    if node.target is operator.getitem and isinstance(meta.value(node.all_input_nodes[0]), (tuple, list)):
        return None
    inputs = [t for operand in node.all_input_nodes for t in meta.tensors(operand) if fakes.token_dim(t) is not None]
    results = list(meta.tensors(node))
    if not inputs or not results:
        return None
    wide = next((t for t in results if sum(map(fakes.has_token_symbol, t.shape)) > 1), None)
    if wide is not None and not any(sum(map(fakes.has_token_symbol, t.shape)) > 1 for t in inputs):
        return f"pairs rows with rows: the result {type_text(wide)} has two token dimensions"
    if all(fakes.token_dim(t) is None for t in results) and any(t.numel() for t in results):
        return f"reduces or selects over the token dimension: the result is {type_text(meta.value(node))}"
    short = rules.op_name(node).partition("::")[2]
    if short in rules.ALONG_DIM and _dim(node, inputs[0]) == fakes.token_dim(inputs[0]):
        return f"works along the token dimension of {type_text(inputs[0])}"
    return None


def _dim(node: fx.Node, operand: torch.Tensor) -> int | None:
    """The dimension an op of ``ALONG_DIM`` works along; its default is the last one, 0 for roll and flip."""
    found = node.kwargs.get("dim", node.kwargs.get("dims"))
    if found is None:
        first_dim = 2 if rules.op_name(node).endswith(("topk", "roll", "diff", "kthvalue")) else 1
        found = node.args[first_dim] if len(node.args) > first_dim else -1
    if isinstance(found, (tuple, list)):
        token = fakes.token_dim(operand)
        return token if any(d % operand.dim() == token for d in found if isinstance(d, int)) else None
    return found % operand.dim() if isinstance(found, int) else None


def _details(offenders: Iterable[tuple[fx.Node, str]], pass_name: str) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for node, why in offenders:
        where = "  ".join(filter(None, (meta.module_path(node) or rules.layer_of(node), meta.source_line(node))))
        lines += [("node", print_node(node)), ("pass", pass_name)]
        lines += [("module", where or "unknown: the graph carries no module stack")]
        lines += [("rule", f"{why} (rules.py)")]
    return lines
