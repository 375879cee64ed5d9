# SPDX-License-Identifier: Apache-2.0
"""``pcp passes``: every pass, what it does, and what it needs and gives."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields
from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pcp_passes.passes.registry import PIPELINES, pass_registry


def passes_json() -> dict[str, Any]:
    """Passes (name, summary, requires, establishes, breaks, options with defaults) and pipelines, as plain data."""
    described = [
        {
            "name": name,
            "summary": summary(cls),
            "requires": sorted(cls.requires),
            "establishes": sorted(cls.establishes),
            "breaks": sorted(cls.breaks),
            "options": {f.name: None if f.default is MISSING else repr(f.default) for f in fields(cls)},
        }
        for name, cls in pass_registry().items()
    ]
    return {"passes": described, "pipelines": {name: [p.name for p in steps] for name, steps in PIPELINES.items()}}


def summary(cls: type) -> str:
    """First sentence of a docstring, without its markup."""
    first = " ".join(inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].split())
    return re.sub(r":\w+:`~?([^`]+)`", r"\1", first).replace("``", "")


def render_passes(data: dict[str, Any]) -> RenderableType:
    """A table of passes and the pipelines under it."""
    table = Table(box=None, pad_edge=False)
    for column in ("pass", "what it does", "requires", "establishes", "breaks", "options"):
        table.add_column(column, overflow="fold")
    for step in data["passes"]:
        invariants = ("\n".join(step[key]) for key in ("requires", "establishes", "breaks"))
        options = "\n".join(f"{key}={default}" if default else key for key, default in step["options"].items())
        table.add_row(Text(step["name"], style="bold"), *map(Text, (step["summary"], *invariants, options)))
    pipelines = Table(title="pipelines", title_justify="left", box=None, show_header=False, pad_edge=False)
    for name, steps in data["pipelines"].items():
        pipelines.add_row(Text(name, style="bold"), Text(" > ".join(steps)))
    return Lines(table, pipelines)
