# SPDX-License-Identifier: Apache-2.0
"""``pcp kernels``: the generated kernels, their texts, and what they occupy on each target."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pcp_passes.errors import ConfigError
from pcp_passes.options import unknown_choice

# pcp_kernels imports torch, which takes seconds: other verbs, and --help, do without it.
if TYPE_CHECKING:
    from pcp_kernels.aot_table import Row
    from pcp_kernels.specs import KernelSpec

BEGIN, END = "<!-- table: written by `pcp kernels --write` -->", "<!-- end of table -->"

kernels_app = typer.Typer(help="Show the generated kernels.", invoke_without_command=True)


@kernels_app.callback()
def kernels(
    context: typer.Context,
    as_json: Annotated[
        bool, typer.Option("--json", help="Compile for every target, and print what comes out.")
    ] = False,
    target: Annotated[list[str] | None, typer.Option(help="With --json: sm_80, sm_90, sm_100 or gfx942.")] = None,
    spec: Annotated[list[str] | None, typer.Option(help="Only this kernel; may be repeated.")] = None,
    write: Annotated[Path | None, typer.Option(help="Compile, and renew the table in this .md and its .json.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Compilers at a time.")] = 2,
) -> None:
    """List the shipped kernels; with --json, compile them ahead of time. Exits with 1 when one breaks a rule."""
    if context.invoked_subcommand is not None:
        return
    from pcp_kernels import catalog
    from pcp_kernels.aot import TARGETS
    from pcp_kernels.aot_table import rows_of, violations

    chosen = {name: find(name) for name in spec or catalog.shipped()}
    if not as_json and write is None:
        if target:
            raise ConfigError("--target says what to compile for, and without --json nothing is compiled: add --json.")
        list_kernels(chosen, Console())
        return
    if write is not None and (spec or target):
        raise ConfigError("--write records every kernel on every target: leave out --spec and --target.")
    with Console(stderr=True).status("compiling") as status:
        data = compile_kernels(
            chosen, target or list(TARGETS), jobs, lambda row: status.update(f"compiled {row.spec} for {row.target}")
        )
    if write is not None:
        write_table(write, data)
    if as_json:
        Console().out(json.dumps(data, indent=2), highlight=False)
    broken = [sentence for row in rows_of(data) for sentence in violations(row)]
    for sentence in broken:
        Console(stderr=True).print(sentence, style="red", markup=False, soft_wrap=True)
    raise typer.Exit(1 if broken else 0)


@kernels_app.command()
def show(
    name: Annotated[str, typer.Argument(help="A kernel of `pcp kernels`.")],
    interpret: Annotated[bool, typer.Option(help="The text for Triton's interpreter.")] = False,
) -> None:
    """Print the generated source of NAME, and on stderr the file that holds it, which is written if it is not there."""
    from pcp_kernels import store
    from pcp_kernels.generate import generate

    spec = find(name)
    at = _kept_in()
    Console().out(generate(spec, interpret), highlight=False, end="")
    path = store.write(spec, interpret=interpret)
    if path.is_relative_to(at):  # a cache that cannot be written was warned of
        Console(stderr=True).out(f"file: {path}", highlight=False)


def find(name: str) -> KernelSpec:
    """The shipped spec called ``name``.

    Raises:
        ConfigError: there is none.
    """
    from pcp_kernels import catalog

    if name not in catalog.shipped():
        near = get_close_matches(name, catalog.shipped(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"unknown kernel {name!r}.{hint} `pcp kernels` lists the {len(catalog.shipped())} there are.")
    return catalog.shipped()[name]


def compile_kernels(
    specs: Mapping[str, KernelSpec], targets: list[str], jobs: int, progress: Callable[[Row], None]
) -> dict[str, Any]:
    """The ahead-of-time table of ``specs`` on ``targets``, as plain data.

    Raises:
        ConfigError: an unknown target, or Triton is not installed.
    """
    from pcp_kernels import store
    from pcp_kernels.aot import TARGETS
    from pcp_kernels.aot_table import measure, table_json

    for name in targets:
        if name not in TARGETS:
            raise ConfigError(unknown_choice("target", name, tuple(TARGETS)))
    if store.triton_version() == "none":
        raise ConfigError("found no Triton; compiling kernels ahead of time needs it. Install triton, 3.6 to 3.9.")
    return table_json(measure(specs.values(), targets, jobs=jobs, progress=progress))


def list_kernels(specs: Mapping[str, KernelSpec], console: Console) -> None:
    """What each kernel does; then the file that holds its text once it was used or shown, whole, to be copied.

    Raises:
        ConfigError: the kernel cache cannot be a folder.
    """
    from pcp_kernels import store

    _kept_in()
    table = Table(box=None, pad_edge=False)
    table.add_column("kernel", no_wrap=True)
    for column in ("family", "what it does"):
        table.add_column(column, overflow="fold")
    for name, spec in specs.items():
        table.add_row(Text(name, style="bold"), spec.family, Text(spec.summary))
    console.print(table)
    console.print("\nfiles; one is written when its kernel first runs, or by `pcp kernels show`", markup=False)
    for name, spec in specs.items():
        path = store.folder(spec) / "kernel.py"
        console.out(f"{name}  {path}{'' if path.is_file() else '  (not written yet)'}", highlight=False)


def _kept_in() -> Path:
    from pcp_kernels import store

    try:
        return store.require_root()
    except store.KernelStoreError as error:
        raise ConfigError(str(error)) from error


def write_table(path: Path, data: Mapping[str, Any]) -> None:
    """Put the table between the marks in ``path``, and the data into the ``.json`` beside it.

    Raises:
        ConfigError: ``path`` is no Markdown file with both marks.
    """
    text = path.read_text() if path.is_file() and path.suffix == ".md" else ""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{path}: found no table to renew; required: a .md file with the lines {BEGIN} and {END}")
    path.write_text(f"{head}{BEGIN}\n\n{markdown(data)}\n{END}{tail}")
    path.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")


def markdown(data: Mapping[str, Any]) -> str:
    """The table for people: one line per kernel, one column per target."""
    from pcp_kernels.aot import TARGETS
    from pcp_kernels.aot_table import rows_of

    rows = {row.key: row for row in rows_of(data)}
    targets = [name for name in TARGETS if any(target == name for _, target in rows)]
    lines = [
        f"Compiled with Triton {data['triton']}. A cell: registers per thread / KiB of shared memory, and where a "
        f"kernel scans keys its matrix instructions and the number of asynchronous copies. Nothing spills.",
        "",
        f"| kernel | {' | '.join(targets)} |",
        f"|---|{'---|' * len(targets)}",
    ]
    for name in dict.fromkeys(name for name, _ in rows):
        cells = [_cell(rows[name, target]) if (name, target) in rows else "" for target in targets]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(row: Row) -> str:
    if row.unsupported:
        return f"— ({row.unsupported})".replace("|", "\\|")
    cell = f"{row.registers} / {row.shared_bytes / 1024:.3g}"
    if row.spills:
        cell += f", **spills {row.spills}**"
    if row.k_loop:
        cell += f", {row.matrix_instructions}, {row.async_copies} copies"
    return cell
