# SPDX-License-Identifier: Apache-2.0
"""``pcp mesh``: the ranks of a mesh, their groups, and the device each gets."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any, cast

import typer
from rich.console import Console, RenderableType
from rich.console import Group as Lines
from rich.table import Table

from pcp_passes.cli.tables import titled
from pcp_passes.errors import ConfigError
from pcp_passes.mesh.axes import GROUPS, Mesh
from pcp_passes.mesh.combinations import LEGEND, Asked, Frontend, require_allowed, rows_of
from pcp_passes.mesh.devices import Placement, place
from pcp_passes.mesh.experts import shard_range

SHOWN_RANKS = 64
"""Ranks of the table; JSON has all."""

MOST_RANKS = 4096
"""Every rank is listed, with all its groups; of more, nobody reads a list."""


def mesh(
    dp: Annotated[int, typer.Option(help="Replicas of the engine.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages of a replica.")] = 1,
    pcp: Annotated[int, typer.Option(help="Ranks that a prefill is sharded over.")] = 2,
    tp: Annotated[int, typer.Option(help="Ranks that weights are sharded over.")] = 1,
    external_dp: Annotated[int, typer.Option(help="Copies that know nothing of each other.")] = 1,
    fold_on_tp: Annotated[bool, typer.Option("--fold-on-tp", help="PCP on the TP ranks: no rank is added.")] = False,
    expert_parallel: Annotated[bool, typer.Option("--expert-parallel", help="Experts sharded over DP x PCP.")] = False,
    experts: Annotated[int | None, typer.Option(min=0, help="Routed experts of a layer.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Decoder layers of the model.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes; 1 by default.")] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="Devices of a node.")] = None,
    local_dp: Annotated[int | None, typer.Option(min=1, help="Engines on each node; as many as fit.")] = None,
    engine: Annotated[str, typer.Option(help="embedded, or vllm: whose refusals apply.")] = "embedded",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show the ranks of a mesh in vLLM's order, their groups and devices; refuse what cannot run."""

    data = mesh_json(
        Mesh(dp, pp, pcp, tp, external_dp, fold_on_tp), engine=engine, expert_parallel=expert_parallel,
        experts=experts, layers=layers, nodes=nodes, devices=devices, local_dp=local_dp,
    )  # fmt: skip
    console = Console()
    if as_json:
        console.out(json.dumps(data, indent=2), highlight=False)
    else:
        console.print(render_mesh(data))


def mesh_json(
    mesh: Mesh,
    *,
    engine: str = "embedded",
    expert_parallel: bool = False,
    experts: int | None = None,
    layers: int | None = None,
    nodes: int | None = None,
    devices: int | None = None,
    local_dp: int | None = None,
) -> dict[str, Any]:
    """A mesh as plain values: sizes, ranks with coordinates, groups by name, places, and what was looked up.

    Args:
        engine: ``embedded`` or ``vllm``: whose refusals apply.
        expert_parallel, experts, layers: as for :func:`pcp_passes.mesh.combinations.require_allowed`.
        nodes, devices: of the cluster, and of each node; without ``devices``, no device is given out.
        local_dp: as for :func:`pcp_passes.mesh.devices.place`.

    Raises:
        ConfigError: the mesh is refused, does not fit on the devices, or has more than :data:`MOST_RANKS` ranks; or
            an option would be without effect.
    """

    given: dict[str, Any] = {"expert_parallel": expert_parallel, "experts": experts, "layers": layers}
    frontend = cast("Frontend", engine)  # an unknown one is refused below
    require_allowed(mesh, frontend=frontend, **given)
    if mesh.world_size > MOST_RANKS:
        raise ConfigError(f"every rank is listed, {MOST_RANKS} at most; found {mesh.world_size}: give smaller axes.")
    if experts is not None and not expert_parallel:
        raise ConfigError(f"--experts {experts} are dealt to ranks with --expert-parallel; add it, or drop --experts.")
    if mesh.fold_on_tp and mesh.tp == 1:
        raise ConfigError(
            "--fold-on-tp with --pcp 1 --tp 1 has nothing to fold; give both one larger size, or drop it."
        )
    if devices is None and (nodes is not None or local_dp is not None):
        raise ConfigError("--nodes and --local-dp place engines on devices; say how many a node has with --devices.")
    placement = None if devices is None else place(mesh, nodes or 1, devices, local_dp=local_dp)
    return {
        "mesh": str(mesh), "world_size": mesh.world_size, "engine_size": mesh.engine_size,
        "ranks": [_rank(mesh, rank, placement) for rank in range(mesh.world_size)],
        "groups": {name: [list(group) for group in mesh.groups(name)] for name in GROUPS},
        "experts": _experts(mesh, expert_parallel, experts),
        "combinations": dict(rows_of(Asked(mesh, frontend, **given))), "legend": LEGEND[frontend],
    }  # fmt: skip


def _rank(mesh: Mesh, rank: int, placement: Placement | None) -> dict[str, Any]:
    placed: dict[str, int | None] = {"node": None, "device": None}
    if placement is not None:
        placed = {"node": placement.places[rank].node, "device": placement.places[rank].device}
    return {"rank": rank, **asdict(mesh.coordinates(rank)), **placed}


def _experts(mesh: Mesh, expert_parallel: bool, experts: int | None) -> list[list[int]] | None:
    """First and last-plus-one expert of each rank of an EP group, in its order; None when experts are not sharded."""
    if not expert_parallel or not experts:
        return None

    ranges = (shard_range(experts, place, mesh.ep) for place in range(mesh.ep))
    return [[first, first + count] for first, count in ranges]


def render_mesh(data: dict[str, Any]) -> RenderableType:
    """A table of ranks, one of groups, and what the table of combinations says."""
    count = data["world_size"]
    lines: list[RenderableType] = [_ranks(data)]
    if count > 1:
        lines.append(_groups(data))
    if count > SHOWN_RANKS:
        lines.append(f"{SHOWN_RANKS} of {count} ranks are shown (--json has all)")
    if data["experts"] is not None and len(data["experts"]) == 1:
        lines.append("experts: whole, on one rank")
    elif data["experts"] is not None:
        lines.append(f"experts by rank of an ep group: {', '.join(_range(*shard) for shard in data['experts'])}")
    size = data["engine_size"]
    lines.append(f"{_counted(count, 'rank')}, {_counted(count // size, 'engine')} of {size}")
    lines += [f"{name}: {status}" for name, status in data["combinations"].items()]
    if data["combinations"]:
        lines.append(data["legend"])
    return Lines(*lines)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _range(first: int, end: int) -> str:
    """Experts of a rank; ``end`` is the next one's first."""
    if end - first < 2:
        return str(first) if end > first else "none"
    return f"{first}-{end - 1}"


def _ranks(data: dict[str, Any]) -> Table:
    axes = [axis for axis in ("external_dp", "dp", "pp", "pcp", "tp") if any(row[axis] for row in data["ranks"])]
    placed = data["ranks"][0]["device"] is not None
    table = titled(data["mesh"], "rank", *axes, *(("node", "device") if placed else ()))
    for row in data["ranks"][:SHOWN_RANKS]:
        cells = [row["rank"], *(row[axis] for axis in axes), *((row["node"], row["device"]) if placed else ())]
        table.add_row(*map(str, cells))
    return table


def _groups(data: dict[str, Any]) -> Table:
    table = titled("groups of more than one rank", "name", "groups")
    for name, groups in data["groups"].items():
        shown = [",".join(map(str, group)) for group in groups if len(group) > 1]
        if shown:
            table.add_row(name, "  ".join(shown))
    return table
