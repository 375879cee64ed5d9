# SPDX-License-Identifier: Apache-2.0
"""The form that the tables of all verbs have."""

from __future__ import annotations

from rich.table import Table


def titled(title: str, *columns: str) -> Table:
    """A table without rows, whose cells fold rather than lose text."""
    # A title is wrapped at the width of its table, which may be less than the terminal has.
    table = Table(title=title, title_justify="left", min_width=min(len(title), 76))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
