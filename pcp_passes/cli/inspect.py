# SPDX-License-Identifier: Apache-2.0
"""``pcp inspect``: capture a model in vLLM, rewrite a copy of its graph, and report."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table

from pcp_passes.frontends.vllm.session import Group, Session, run


def inspect_model(model: str, *, pcp: int, layers: int | None = None) -> dict[str, Any]:
    """The rewrite report of ``model`` for ``pcp`` ranks, with the rewritten graph's text under ``graph``.

    One process, dummy weights, nothing generated: only ``config.json`` is needed.
    """
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


def render_report(report: dict[str, Any]) -> RenderableType:
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
