# SPDX-License-Identifier: Apache-2.0
"""Invariants of a graph, each a named function that raises with *all* offenders.

A pass states in ``requires``, ``establishes`` and ``breaks`` which of them it needs, makes true or makes false; a
verifying observer checks those that stand. Each function takes the graph and the context, is linear in the number of
nodes, and changes nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import fx

from pcp_passes.collectives import ALL_GATHER_ROWS, is_collective, is_gather
from pcp_passes.errors import InvariantError, RankMismatch
from pcp_passes.ir import buffers, fakes, meta, rules
from pcp_passes.ir.markers import is_marker, marker_rows
from pcp_passes.ir.placements import Partial, Placement, RankMajor, Replicate, Shard
from pcp_passes.ir.printer import print_node, type_text
from pcp_passes.ir.revalue import call_key, type_key

if TYPE_CHECKING:
    from pcp_passes.passes.base import PassContext

WELL_FORMED = "WELL_FORMED"
META_FRESH = "META_FRESH"
PLACED = "PLACED"
CONFLICT_FREE = "CONFLICT_FREE"
ORDER_KNOWN = "ORDER_KNOWN"
COALESCED = "COALESCED"
PADDING_DEFINED = "PADDING_DEFINED"
EQUAL_COLLECTIVES = "EQUAL_COLLECTIVES"
LOWERED = "LOWERED"
RANK_FREE = "RANK_FREE"
ONE_SYMBOL = "ONE_SYMBOL"
NO_NEW_ALIAS = "NO_NEW_ALIAS"
NO_PARTIAL_OUT = "NO_PARTIAL_OUT"

Offence = tuple[fx.Node, str]
Check = Callable[[fx.Graph, "PassContext"], None]


def require(name: str, rule: str, offences: Iterable[Offence]) -> None:
    """Raise :class:`InvariantError` with every offender, or return when there is none."""
    found = list(offences)
    if not found:
        return
    lines = [f"{name}: {rule}; {len(found)} offender{'s' if len(found) > 1 else ''}."]
    for node, why in found:
        where = "  ".join(filter(None, (meta.module_path(node), meta.source_line(node))))
        maker = meta.info(node).created_by
        lines += [f"  node    {print_node(node)}", f"  found   {why}"]
        lines += [f"  module  {where}"] if where else []
        lines += [f"  pass    {maker}"] if maker else []
    lines.append("  next    dump the graph after each pass (DumpObserver) and see which one wrote the node")
    raise InvariantError("\n".join(lines))


def well_formed(graph: fx.Graph, ctx: PassContext) -> None:
    """The graph passes ``fx``'s own lint, inputs come first, and every inserted node is used."""
    try:
        graph.lint()
    except RuntimeError as error:
        raise InvariantError(f"{WELL_FORMED}: fx lint failed: {error}") from error
    offences: list[Offence] = []
    inputs_over = False
    for node in graph.nodes:
        inputs_over |= node.op != "placeholder"
        if inputs_over and node.op == "placeholder":
            offences.append((node, "an input after the first computation"))
        if meta.info(node).created_by and not node.users and not rules.mutated_arguments(node):
            offences.append((node, "inserted by a pass and used by nothing"))
    require(WELL_FORMED, "inputs come first and every inserted node is used", offences)


def meta_fresh(graph: fx.Graph, ctx: PassContext) -> None:
    """Values of inserted nodes, and of the nodes that read one, are what running the node on its operands gives."""
    near = [n for n in graph.nodes if meta.info(n).created_by or any(map(_inserted, n.all_input_nodes))]
    seen: _Seen = {}
    offences = (_stale(node, seen) for node in near)
    require(META_FRESH, "a node's value is what its operands give", filter(None, offences))


def meta_fresh_full(graph: fx.Graph, ctx: PassContext) -> None:
    """:func:`meta_fresh` for every node: about a millisecond each, so for tests."""
    offences = (_stale(node, {}) for node in graph.nodes)
    require(META_FRESH, "a node's value is what its operands give", filter(None, offences))


def _inserted(node: fx.Node) -> bool:
    return meta.info(node).created_by is not None


#: What running a call gave, by the call: the layers of a decoder repeat theirs, and running one costs a millisecond.
_Seen = dict[str, Any]


def _stale(node: fx.Node, seen: _Seen) -> Offence | None:
    if node.op not in ("call_function", "call_method"):
        return None
    if not meta.has_value(node):
        return (node, "no value") if _inserted(node) else None
    stated = meta.value(node)
    if not meta.holds_tensor(node) or not any(map(meta.holds_tensor, node.all_input_nodes)):
        return None
    call = call_key(node)
    try:
        fresh = seen[call] if call in seen else seen.setdefault(call, meta.compute_value(node))
    except Exception as error:  # an op can fail on operands of the wrong shape in any way it likes
        return node, f"its operands are not accepted: {type(error).__name__}: {error}".splitlines()[0]
    if type_key(fresh) == type_key(stated):
        return None
    return node, f"stated {type_text(stated)}, but its operands give {type_text(fresh)}"


def placed(graph: fx.Graph, ctx: PassContext) -> None:
    """Every node with a tensor value has a placement."""
    require(PLACED, "every tensor has a placement", (
        (node, "no placement") for node in graph.nodes
        if node.op != "output" and meta.holds_tensor(node) and meta.placement(node) is None
    ))  # fmt: skip


def conflict_free(graph: fx.Graph, ctx: PassContext) -> None:
    """Cache writes get rank-major rows, attention gets rank-local ones, and no other op mixes the two."""
    offences: list[Offence] = []
    wanted: Placement
    for node in graph.nodes:
        rule = rules.rule_of(node)
        if isinstance(rule, rules.CacheWrite):
            wanted, positions, why = RankMajor(), rule.rows, "the slot mapping lists the rows of all ranks"
        elif isinstance(rule, rules.LocalQuery):
            kept = (rule.query, *rule.new_rows, *(() if rule.output is None else (rule.output,)))
            wanted, positions, why = Shard(0), kept, "queries and lengths are rank-local"
        else:
            taken = node.all_input_nodes[:1] if is_collective(node) else node.all_input_nodes
            kinds = {type(meta.placement(operand)) for operand in taken}
            if node.op != "output" and {RankMajor, Shard} <= kinds:
                offences.append((node, "reads rank-local and rank-major rows at once"))
            continue
        for position in positions:
            rows = rules.argument(node, position)
            if isinstance(rows, fx.Node) and meta.placement(rows) != wanted:
                found = f"operand {position}, %{rows.name}, is {meta.placement(rows)}"
                offences.append((node, f"{found}; required {wanted}: {why}"))
    require(CONFLICT_FREE, "every operand has the placement its op needs", offences)


def order_known(graph: fx.Graph, ctx: PassContext) -> None:
    """Rank-major is stated exactly where a reshard or a gather made it, and follows from there up to a partial sum."""
    offences: list[Offence] = []
    for node in graph.nodes:
        if node.op == "output" or not meta.holds_tensor(node):
            continue
        if isinstance(rules.rule_of(node), rules.CacheWrite) or _sums(node):
            continue
        makes = is_marker(node) or is_gather(node)
        inherits = any(meta.placement(operand) == RankMajor() for operand in node.all_input_nodes)
        stated = meta.placement(node) == RankMajor()
        if stated and not (makes or inherits):
            offences.append((node, "stated rank_major, but nothing it reads was gathered"))
        if (makes or inherits) and not stated:
            offences.append((node, f"holds gathered rows, but is stated {meta.placement(node)}"))
    require(ORDER_KNOWN, "the order of rows is stated where it changes and kept after", offences)


def _sums(node: fx.Node) -> bool:
    """Whether the node makes or reduces a partial sum, whose rows are those that were dispatched."""
    return meta.placement(node) == Partial() or (is_collective(node) and not is_gather(node))


def coalesced(graph: fx.Graph, ctx: PassContext) -> None:
    """A cache write is fed by at most one collective per dtype."""
    offences: list[Offence] = []
    for node in graph.nodes:
        rule = rules.rule_of(node)
        if not isinstance(rule, rules.CacheWrite):
            continue
        operands = [argument for p in rule.rows if isinstance(argument := rules.argument(node, p), fx.Node)]
        sources = {source for operand in operands if (source := gather_of(operand)) is not None}
        kinds = [tensor.dtype for source in sources for tensor in list(meta.tensors(source))[:1]]
        if len(kinds) > len(set(kinds)):
            offences.append((node, f"{len(kinds)} collectives for {len(set(kinds))} dtype(s)"))
    require(COALESCED, "the rows of one cache write ride in one collective per dtype", offences)


def gather_of(operand: fx.Node) -> fx.Node | None:
    """The reshard or collective an operand is a part of, or ``None``."""
    seen = operand
    while not (is_marker(seen) or is_collective(seen)):
        if meta.placement(seen) != RankMajor() or not seen.all_input_nodes:
            return None
        seen = seen.all_input_nodes[0]
    return seen


def padding_defined(graph: fx.Graph, ctx: PassContext) -> None:
    """What attention leaves unwritten in its output buffer is zero."""
    offences: list[Offence] = []
    for node in graph.nodes:
        rule = rules.rule_of(node)
        if not isinstance(rule, rules.LocalQuery) or rule.output is None or rule.writes_padding:
            continue
        buffer = rules.argument(node, rule.output)
        if not buffers.is_zero_filled(buffers.base_of(buffer)) and not buffers.filled_before(buffer, node):
            offences.append((node, f"its output buffer %{buffer.name} is not zero-filled"))
    require(PADDING_DEFINED, "padded rows of an attention output are defined", offences)


def equal_collectives(graph: fx.Graph, ctx: PassContext) -> None:
    """A collective of rows runs over the context's axis, and its operand has one shape on all ranks: M rows, constant
    width. Ragged ones run over another axis; between them lie the rows of all its ranks, as many on each PCP rank."""
    offences: list[Offence] = []
    for node in graph.nodes:
        if is_collective(node) or is_marker(node):
            offences += [(node, why) for why in _unequal(node, ctx)]
    require(EQUAL_COLLECTIVES, "all ranks give a collective the same shape", offences)


def _unequal(node: fx.Node, ctx: PassContext) -> Iterable[str]:
    ragged = not is_marker(node) and rules.op_name(node) in _RAGGED
    if ragged and node.args[-1] == ctx.axis:
        yield f"over {ctx.axis!r}, whose ranks bring equal rows; required {ALL_GATHER_ROWS} or {_REDUCE_ROWS} there"
    elif not ragged and tuple(node.args[-2:]) != (ctx.pcp, ctx.axis):
        yield f"over {node.args[-2:]}; required {(ctx.pcp, ctx.axis)}"
    summed = is_collective(node) and not is_gather(node)
    for row in marker_rows(node):
        held = meta.tensor(row)
        if held is None or held.dim() == 0:
            yield f"operand %{row.name} has no rows"
        elif any(map(fakes.has_unbacked_symbol, held.shape)) and not _counts_ragged(row):
            yield f"operand {type_text(held)} has a size that depends on data"
        elif not summed and not fakes.is_plain_symbol(held.shape[0]):
            yield f"operand {type_text(held)} has {held.shape[0]} rows; required the bare token count"
        elif any(map(fakes.has_token_symbol, held.shape[1:])):
            yield f"operand {type_text(held)} has a row width that is not constant"
        elif is_gather(node) and not held.is_contiguous():
            yield f"operand {type_text(held)} is not contiguous: strides {tuple(held.stride())}"


_REDUCE_ROWS = "pcp::reduce_rows"
_RAGGED = frozenset({"pcp::gather_ragged", "pcp::reduce_ragged"})


def _counts_ragged(row: fx.Node) -> bool:
    """Whether rows are those that a ragged gather delivered: their number is on the host of every rank."""
    waiting, seen = [row], set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if rules.op_name(node) == "pcp::gather_ragged":
            return True
        if node not in seen and any(any(map(fakes.has_unbacked_symbol, t.shape)) for t in meta.tensors(node)):
            seen.add(node)
            waiting += node.all_input_nodes
    return False


def lowered(graph: fx.Graph, ctx: PassContext) -> None:
    """No reshard marker is left."""
    require(LOWERED, "no marker is left", ((n, "a marker has no body") for n in graph.nodes if is_marker(n)))


def rank_free(graph: fx.Graph, ctx: PassContext) -> None:
    """Nothing in the graph belongs to one rank: no group object, no rank query, no device of an inserted node."""
    offences: list[Offence] = []
    for node in graph.nodes:
        held: list[object] = []
        fx.node.map_aggregate((node.args, node.kwargs), held.append)
        if any(isinstance(argument, (dist.ProcessGroup, torch.ScriptObject)) for argument in held):
            offences.append((node, "holds a process-group (or script) object"))
        if _inserted(node) and any(isinstance(a, torch.device) and a.index is not None for a in held):
            offences.append((node, "an inserted node names one device"))
        if rules.op_name(node).partition("::")[2] in ("get_rank", "get_node_local_rank", "get_group_rank"):
            offences.append((node, "asks for the rank"))
    require(RANK_FREE, "graph text is the same on every rank", offences)


def one_symbol(graph: fx.Graph, ctx: PassContext) -> None:
    """``P*M`` stays an expression: no pass adds an input or a size node, so no piece has ``P*M`` as its first size."""
    require(ONE_SYMBOL, "passes add no inputs and no sizes", (
        (node, "an inserted input" if node.op == "placeholder" else "an inserted node whose value is a size")
        for node in graph.nodes
        if _inserted(node) and (node.op == "placeholder" or isinstance(meta.value(node), (torch.SymInt, int)))
    ))  # fmt: skip


def no_new_alias(graph: fx.Graph, ctx: PassContext) -> None:
    """An inserted view is neither returned nor read after something has written what it looks at."""
    offences: list[Offence] = []
    written: dict[int, fx.Node] = {}
    position = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        for operand in node.all_input_nodes:
            if not _inserted(operand) or rules.mutated_arguments(operand):
                continue
            last = next((w for key in _storages(operand) if (w := written.get(key)) is not None), None)
            if last is not None and position[last] > position[operand]:
                offences.append((operand, f"read by %{node.name} after %{last.name} wrote its storage"))
            if node.op == "output" and not is_collective(operand):  # which never aliases its operand
                offences.append((operand, "inserted, and returned by the graph"))
        for target in rules.mutated_arguments(node):
            written.update(dict.fromkeys(_storages(target), node))
    require(NO_NEW_ALIAS, "passes share no storage with what is written or returned", offences)


def _storages(node: fx.Node) -> set[int]:
    return {key for tensor in meta.tensors(node) if (key := fakes.storage_key(tensor)) is not None}


def no_partial_out(graph: fx.Graph, ctx: PassContext) -> None:
    """What leaves the graph is rank-local rows or replicated: never gathered rows, nor rows reduced on one rank."""
    end = next(iter(reversed(graph.nodes)))
    offences: list[Offence] = []
    for result in end.all_input_nodes:
        where = meta.placement(result)
        if where is not None and not isinstance(where, (Shard, Replicate)):
            offences.append((result, f"an output that is {where}; required shard or replicate"))
        if isinstance(where, Shard) and not any(
            fakes.has_token_symbol(t.shape[where.dim]) for t in meta.tensors(result) if t.dim() > where.dim
        ):
            offences.append((result, "an output stated shard without a token dimension"))
    require(NO_PARTIAL_OUT, "outputs are rank-local rows or replicated", offences)


INVARIANTS: dict[str, Check] = {
    WELL_FORMED: well_formed,
    META_FRESH: meta_fresh,
    PLACED: placed,
    CONFLICT_FREE: conflict_free,
    ORDER_KNOWN: order_known,
    COALESCED: coalesced,
    PADDING_DEFINED: padding_defined,
    EQUAL_COLLECTIVES: equal_collectives,
    LOWERED: lowered,
    RANK_FREE: rank_free,
    ONE_SYMBOL: one_symbol,
    NO_NEW_ALIAS: no_new_alias,
    NO_PARTIAL_OUT: no_partial_out,
}
"""Every invariant by name, in the order a verifier checks them."""

OF_A_CAPTURE: frozenset[str] = frozenset({LOWERED, COALESCED})
"""What holds of a captured graph: it has no reshard at all."""

ALWAYS: frozenset[str] = frozenset({WELL_FORMED, META_FRESH, RANK_FREE, ONE_SYMBOL, NO_NEW_ALIAS, NO_PARTIAL_OUT})
"""What no pass may break, even for a moment."""


ON_TOKENS: frozenset[str] = frozenset({WELL_FORMED, META_FRESH, RANK_FREE})
"""The same for a graph of all tokens, which has plan inputs, sizes of its own, and returns what it gathered."""


def check(names: Iterable[str], graph: fx.Graph, ctx: PassContext) -> None:
    """Check the named invariants; the first that fails raises :class:`InvariantError`."""
    wanted = set(names)
    for name, function in INVARIANTS.items():
        if name in wanted:
            function(graph, ctx)


def same_on_all_ranks(texts: Mapping[int, str]) -> None:
    """Raise :class:`RankMismatch` unless every rank has the text of rank 0 (see ``printer.rank_free_text``).

    Args:
        texts: rank to text; the error names every rank that differs and shows the first lines that do.
    """
    first = min(texts)
    different = [rank for rank in sorted(texts) if texts[rank] != texts[first]]
    if not different:
        return
    rank = different[0]
    pair = texts[first].splitlines(), texts[rank].splitlines()
    lines = list(difflib.unified_diff(*pair, f"rank {first}", f"rank {rank}", n=0, lineterm=""))[:12]
    raise RankMismatch(
        f"the graph of rank {', '.join(map(str, different))} differs from that of rank {first}; required the same text "
        "on all ranks. Start every rank with the same model, options and versions.\n" + "\n".join(lines)
    )
