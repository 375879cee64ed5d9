# SPDX-License-Identifier: Apache-2.0
"""``pcp why``: one node of a dump, across the stages: who made it, who changed it, where its rows live, and why."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pcp_passes import dumps
from pcp_passes.errors import DumpError
from pcp_passes.ir import rules
from pcp_passes.ir.parsing.syntax import Statement, read_statements

_SHOWN_USERS = 12


@dataclass(frozen=True)
class _View:
    """One stage as statements by name."""

    stage: dumps.Stage
    statements: dict[str, Statement]


def explain(path: Path, node: str) -> dict[str, Any]:
    """What a dump says of one node. Text only: what the graph calls need not be loaded here.

    Args:
        path: a dump folder.
        node: a node's name, with or without ``%``.

    Raises:
        DumpError: no stage has a node of that name (the error names close ones), or the dump is broken.
    """
    dump = dumps.one_dump(path)
    name = node.removeprefix("%")
    views = [_View(s, {st.name: st for st in read_statements(s.text(), s.file)}) for s in dump.stages]
    holding = [view for view in views if name in view.statements]
    if not holding:
        known = dict.fromkeys(key for view in views for key in view.statements if key)
        near = get_close_matches(name, known, n=3)
        hint = f" Did you mean {', '.join('%' + n for n in near)}?" if near else ""
        raise DumpError(f"no stage of {dump.folder} has a node %{name}.{hint}")
    last = holding[-1]
    statement = last.statements[name]
    placed = next((view for view in holding if view.statements[name].kind.placement_text), None)
    return {
        "node": name,
        "text": statement.text.rstrip(),
        "stage": last.stage.file,
        "origin": _origin(statement, holding[0].stage),
        "module": statement.comment.module,
        "source": statement.comment.source,
        "layer": statement.comment.layer,
        "placement": statement.kind.placement_text,
        "placed_by": placed.stage.name if placed else "",
        "because": statement.comment.reason,
        "rule": rule_text(statement),
        "operands": [_text(last, operand) for operand in statement.operands],
        "users": [other.text.rstrip() for other in last.statements.values() if name in other.operands],
        "history": list(_history(views, name)),
        "notes": [
            {"pass": stage.name, "text": note}
            for stage in dump.stages for note in stage.notes if re.search(rf"%{re.escape(name)}\b", note)
        ],
    }  # fmt: skip


def _origin(statement: Statement, first: dumps.Stage) -> str:
    """Which pass made the node, by its own record; the stage it first stands in confirms or replaces that."""
    made = statement.comment.by or (first.name if first.name != "captured" else "")
    text = f"made by {made}" if made else "captured"
    return f"{text}, changed by {statement.comment.changed_by}" if statement.comment.changed_by else text


def _text(view: _View, name: str) -> str:
    found = view.statements.get(name)
    return found.text.rstrip() if found else f"%{name}"


def _history(views: list[_View], name: str) -> Iterator[dict[str, str]]:
    """Each stage in which the node appears, is another line, or is gone."""
    before: Statement | None = None
    for view in views:
        now = view.statements.get(name)
        if now is not None and (before is None or now.text.rstrip() != before.text.rstrip()):
            event = "appears" if before is None else "changes"
            yield {"stage": view.stage.file, "event": event, "text": now.text.rstrip()}
        if now is None and before is not None:
            yield {"stage": view.stage.file, "event": "is gone", "text": ""}
        before = now


def rule_text(statement: Statement) -> str:
    """What the rule tables say of what a statement calls; ``""`` for inputs and attributes."""
    if statement.op not in ("call_function", "call_method"):
        return ""
    name = qualified(statement)
    if name in rules.RULES:
        return repr(rules.RULES[name])
    if name in rules.ABSENT:
        return f"deliberately none: {rules.ABSENT[name]}"
    from pcp_passes.aten import table

    rule = table.TABLE.get(name)
    if rule is not None:
        says = inspect.cleandoc(rule.__doc__ or "").split("\n\n")[0]
        return f"{rule.__module__.rpartition('.')[2]}.{rule.__name__}: {' '.join(says.split()).replace('``', '')}"
    return f"the tables have none for {name}"


def qualified(statement: Statement) -> str:
    """The name that rules are keyed by: ``aten::add`` for ``aten.add.Tensor``, ``method::view`` for ``%x.view``."""
    if statement.op == "call_method":
        return f"method::{statement.target}"
    namespace, _, rest = statement.target.partition(".")
    parts = rest.split(".")
    return f"{namespace}::{parts[-1] if namespace == 'torch' else parts[0]}"


def render_why(data: dict[str, Any]) -> RenderableType:
    """The facts as a list, then the history."""
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    module = "  ".join(filter(None, (data["module"], data["source"])))
    where = f"{data['placement']}, first stated by {data['placed_by']}" if data["placement"] else "none recorded"
    rows = [("node", data["text"]), ("stage", data["stage"]), ("origin", data["origin"]), ("module", module)]
    rows += [("layer", data["layer"]), ("placement", where), ("because", data["because"]), ("rule", data["rule"])]
    rows += [("operand", text) for text in data["operands"]]
    rows += [("user", text) for text in data["users"][:_SHOWN_USERS]]
    if len(data["users"]) > _SHOWN_USERS:
        rows.append(("", f"... and {len(data['users']) - _SHOWN_USERS} more users"))
    rows += [("note", f"{note['pass']}: {note['text']}") for note in data["notes"]]
    for label, text in rows:
        if text:
            facts.add_row(label, Text(text))
    history = Table(title="stages", title_justify="left", box=None, show_header=False, pad_edge=False)
    for event in data["history"]:
        history.add_row(event["stage"], Text(event["event"], style="bold"), Text(event["text"]))
    return Lines(facts, history)
