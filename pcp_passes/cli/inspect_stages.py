# SPDX-License-Identifier: Apache-2.0
"""``pcp inspect --pp/--dp/--expert-parallel``: stages of a model, their wires, and collectives by group."""

from __future__ import annotations

from typing import Any

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table

from pcp_passes.cli.inspect_indexers import ranges
from pcp_passes.cli.tables import titled
from pcp_passes.errors import ConfigError
from pcp_passes.inspection.sources import load_config
from pcp_passes.inspection.stages import ModelStages, StageLine, inspect_stages_config
from pcp_passes.mesh.axes import Mesh


def inspect_stages(
    model: str, *, pcp: int, pp: int, dp: int, vllm: bool = False, cudagraph: bool = False, **options: Any
) -> ModelStages:
    """The report of a model on a mesh.

    Options and errors as for :func:`pcp_passes.inspection.stages.inspect_stages_config`; ``model`` as for
    :func:`pcp_passes.inspection.sources.load_config`.

    Raises:
        ConfigError: ``vllm`` or ``cudagraph`` too.
    """
    for name, given in (("--vllm", vllm), ("--cudagraph", cudagraph)):
        if given:
            raise ConfigError(
                f"--pp, --dp and --expert-parallel look at the stages of a step program; found {name} too. Give one of "
                "them."
            )
    return inspect_stages_config(load_config(model), name=model, mesh=Mesh(dp=dp, pp=pp, pcp=pcp), **options)


def render_stages(found: ModelStages) -> RenderableType:
    """A table of stages and one of collectives; then what is restored, and how the ranks group."""
    return Lines(_stages(found), _exchanges(found), *_lines(found))


def _stages(found: ModelStages) -> Table:
    title = f"{found.model} on {found.mesh}, {found.dtype}" + (
        f", drafter {found.drafter}" if found.drafter != "none" else ""
    )
    table = titled(title, "stage", "layers", "takes", "bytes a row", "restores")
    for stage in found.stages:
        layers = ranges(range(stage.first_layer, stage.end_layer)) + (", drafter" if stage.drafter else "")
        wires = "\n".join(wire.name for wire in stage.wires_in) or "token ids"
        sizes = "\n".join(f"{wire.bytes_per_row:,} B" for wire in stage.wires_in)
        table.add_row(str(stage.index), layers, wires, sizes, _restored(stage))
    return table


def _restored(stage: StageLine) -> str:
    return "\n".join(f"rows of {line.source}" for line in stage.restores.get("sharded", ())) or "nothing"


def _exchanges(found: ModelStages) -> Table:
    table = titled("collectives", "stage", "of", "group", "op", "carries", "times", "bytes a row")
    for stage in found.stages:
        for program, lines in stage.exchanges.items():
            for line in lines:
                call = line.call or f"the {program} step"
                size = f"{line.bytes_per_row:,} B"
                table.add_row(str(stage.index), call, line.group, line.op, line.carries, str(line.times), size)
    return table


def _lines(found: ModelStages) -> list[str]:
    mesh = found.mesh
    lines = [f"{mesh.world_size} rank{'s' * (mesh.world_size > 1)}"]
    if mesh.pp > 1:
        lines.append(
            "a wire goes from each rank to the rank of the next stage with the same dp and pcp place, its own rows "
            "alone"
        )
    if mesh.pp > 1 or mesh.ep > 1:
        lines.append(
            "bytes a row: of one rank's operand, for each of its rows in the call; all replicas with as many rows"
        )
    if mesh.dp > 1 and not found.expert_parallel:
        whole = ": the experts are whole on every rank" if found.has_experts else ""
        lines.append(f"the {mesh.dp} replicas exchange nothing{whole}")
    if mesh.dp > 1 and found.expert_parallel:
        lines.append("replicas run every step together: an idle one runs a dummy step")
    if found.captured < found.layers:
        lines.append(
            f"{found.captured} of {found.layers} layers were captured, of each stage the first, the last and one of "
            "each kind; times are those of all layers (--full captures all)"
        )
    return lines
