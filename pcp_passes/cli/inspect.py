# SPDX-License-Identifier: Apache-2.0
"""``pcp inspect``: what sharding a model means, from its configuration alone, or captured in vLLM."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table

from pcp_passes.cli.inspect_indexers import render_indexers
from pcp_passes.cli.tables import titled
from pcp_passes.inspection.ledger import Category, Cost
from pcp_passes.inspection.report import OUTSIDE, ModelReport
from pcp_passes.inspection.run import inspect_config
from pcp_passes.inspection.sources import load_config
from pcp_passes.ir.printer import print_graph

SMALL = 0.005
"""Modules below this share of all products are summed up in one line."""


def inspect_configuration(model: str, **options: Any) -> tuple[ModelReport, str]:
    """Inspect a configuration, without weights; the report, and the text of the rewritten graph.

    Options and errors as for :func:`pcp_passes.inspection.run.inspect_config`; ``model`` as for
    :func:`pcp_passes.inspection.sources.load_config`.
    """
    report, graph = inspect_config(load_config(model), name=model, **options)
    return report, print_graph(graph)


def render_model(report: ModelReport) -> RenderableType:
    """Tables of layers, modules, collectives and attention; then memory, choices, fallbacks and the bound."""
    parts = [_kinds(report), _modules(report), _gathers(report), _attention(report), *render_indexers(report)]
    return Lines(*parts, *_lines(report))


def _kinds(report: ModelReport) -> Table:
    title = (
        f"{report.model} ({report.model_type}, {report.dtype}): {report.tokens:,} tokens on {report.pcp} PCP ranks, "
        f"{report.layout}, {report.rows:,} rows a rank"
    )
    table = titled(title, "layers", "times", "parameters of one", "products, one rank alone", "of each rank", "share")
    sizes = {line.label: (line.times, _si(line.parameters)) for line in report.kinds} | {OUTSIDE: (1, "")}
    for label, (times, parameters) in sizes.items():
        members = [part for part in report.parts if part.kind == label]
        whole = sum(part.whole.products * part.times for part in members)
        rank = sum(cost.products * part.times for part in members for cost in part.rank.values())
        table.add_row(label, str(times), parameters, _si(whole), _si(rank), f"{rank / whole:.1%}" if whole else "")
    return table


def _modules(report: ModelReport) -> Table:
    names: tuple[Category, ...] = ("sharded", "repeated", "fallback", "chosen")
    table = titled("products by module, all layers of a kind", "layers", "module", "one rank alone", *names)
    groups: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    total = report.whole.products
    for part in report.parts:
        key = (part.kind, ".".join(part.module.split(".")[:2]) or "(itself)")
        groups[key]["whole"] += part.whole.products * part.times
        for category, cost in part.rank.items():
            groups[key][category] += cost.products * part.times
    rest: dict[str, int] = defaultdict(int)
    for (kind, module), sums in groups.items():
        if max(sums.values()) >= SMALL * total:
            table.add_row(kind, module, _si(sums["whole"]), *(_si(sums[name]) if sums[name] else "" for name in names))
            continue
        for column, count in sums.items():
            rest[column] += count
    table.add_row("all", "everything else", _si(rest["whole"]), *(_si(rest[n]) if rest[n] else "" for n in names))
    return table


def _gathers(report: ModelReport) -> Table:
    table = titled("collectives", "layers", "times", "module", "collective", "sent by a rank", "in all layers")
    for line in report.gathers:
        op = f"{line.count} x {line.op}, {line.dtype}"
        table.add_row(line.kind, str(line.times), line.module, op, _bytes(line.sent), _bytes(line.sent * line.times))
    return table


def _attention(report: ModelReport) -> Table:
    table = titled("attention", "layers", "times", "module", "a query sees", "cache of a token", "busiest rank / mean")
    for line in report.attention:
        mean = sum(line.work) / len(line.work)
        uneven = f"{max(line.work) / mean:.4f}" if mean else ""
        table.add_row(line.kind, str(line.times), line.module, line.sees, f"{line.cached:,} B", uneven)
    return table


def _lines(report: ModelReport) -> Iterator[str]:
    memory, spent = report.memory, report.by_category()
    rank = report.rank.products or 1
    real = sorted(set(report.real_rows))
    yield f"rows of a rank: {report.rows:,}, of which {' or '.join(f'{n:,}' for n in real)} are tokens"
    yield "products of each rank: " + ", ".join(
        f"{name} {_si(cost.products)} ({cost.products / rank:.2%})" for name, cost in spent.items() if cost.products
    )
    others = sum(spent.values(), Cost()).elements
    yield f"other operations of each rank: {_si(others)} (one rank alone: {_si(report.whole.elements)})"
    yield f"{report.collectives} collectives a prefill; each rank sends {_bytes(report.sent)}"
    yield (
        f"memory of each rank: weights {_bytes(memory.weights)} (all of them: PCP shards tokens), cache "
        f"{memory.cache_per_token:,} B a token, {_bytes(memory.cache)} for the prompt; activations at most "
        f"{_bytes(memory.live)} (one rank alone {_bytes(memory.live_whole)})"
    )
    yield (
        f"at most {report.bound_seen:.2f} times as fast as one rank (counting the pairs that attention sees; "
        f"{report.bound:.2f} over all pairs)"
    )
    yield from report.notes
    for choice in report.choices:
        yield f"choice  {_where(' + '.join(choice.kinds), choice.module)}: {choice.text}"
    for found in report.fallbacks:
        yield (
            f"fallback  {_where(found.kind, found.module)}, {found.times} times: {found.op} at {found.source or '?'} "
            f"{found.reason}: gathers {_bytes(found.gathered)}, and every rank repeats "
            f"{_si(found.cost.products + found.cost.elements)} operations"
        )
    if not report.fallbacks:
        yield "no fallback: nothing that mixes tokens runs whole"


def _where(kind: str, module: str) -> str:
    return f"{kind}: {module}" if module else kind


def _si(count: float) -> str:
    for scale, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= scale:
            return f"{count / scale:.3g} {letter}"
    return f"{count:.0f}"


def _bytes(count: int) -> str:
    return f"{_si(count)}B" if count >= 1000 else f"{count} B"


def inspect_in_vllm(model: str, *, pcp: int, layers: int | None = None) -> dict[str, Any]:
    """The rewrite report of ``model`` for ``pcp`` ranks, with the rewritten graph's text under ``graph``.

    One process, dummy weights, nothing generated: only ``config.json`` is needed.
    """
    from pcp_passes.frontends.vllm.session import Group, Session, run

    with tempfile.TemporaryDirectory(prefix="pcp-inspect-") as folder:
        engine: dict[str, Any] = {"load_format": "dummy", "max_model_len": 256, "max_num_seqs": 2}
        engine |= {"skip_tokenizer_init": True, "max_num_batched_tokens": 256}
        if layers is not None:
            engine["hf_overrides"] = {"num_hidden_layers": layers}
        session = Session(
            model=model,
            pcp=1,
            backend="eager",
            groups=(Group(rpc=("pcp_passes.frontends.vllm.probe:report",)),),
            options={"mode": "check", "ranks": pcp, "dump": folder},
            engine=engine,
        )
        reports = run(session).rpc[0][0][0]
        assert reports, "check mode reports every captured graph"
        name, report = next(iter(reports.items()))
        dumps = sorted((Path(folder) / name).glob("**/*.txt"))
        graph = next((d.read_text() for d in reversed(dumps) if "lower-reshards" in d.name), "")
    return {"model": model, "pcp": pcp, **report, "graph": graph}


def render_vllm(report: dict[str, Any]) -> RenderableType:
    """A table of layers, the totals, and what happened to every kind of value."""
    totals, why = report["totals"], report["why"]
    table = Table(title=f"{report['model']} over {report['pcp']} PCP ranks", title_justify="left")
    for name in ("layer", "gathered before the cache write", "sent / row", "kept / row", "padded rows"):
        table.add_column(name, overflow="fold")
    for layer in report["layers"]:
        gathers = [f"{c['parts']} in one {c['op']}: {c['row_elements']} x {c['dtype']}" for c in layer["collectives"]]
        sent, kept = f"{layer['sent']:,} B", f"{layer['gathered']:,} B"
        table.add_row(layer["layer"], "\n".join(gathers) or "nothing", sent, kept, layer["padding"])
    kinds = Table(show_header=False, box=None)
    for kind, count in report["nodes"].items():
        kinds.add_row(kind, f"{count} values", why[kind])
    summary = (
        f"{totals['collectives']} collectives a step; per rank-local row {totals['sent']:,} bytes sent, "
        f"{totals['gathered']:,} bytes kept; a pure decode step runs the replicated body: no collective"
    )
    return Lines(table, kinds, summary)
