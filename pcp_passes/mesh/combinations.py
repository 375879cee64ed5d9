# SPDX-License-Identifier: Apache-2.0
"""Which meshes and features go together: one table for the embedded engine, vLLM's check and ``pcp mesh``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from pcp_passes.errors import ConfigError
from pcp_passes.mesh.axes import Mesh

Frontend = Literal["embedded", "vllm"]
#: ``executed``: tests run it against one rank. ``allowed``: nothing stands against it, and no test runs it.
Status = Literal["executed", "allowed", "refused"]

#: What ``executed`` covers, and what the table leaves to others.
LEGEND: dict[Frontend, str] = {
    "embedded": "executed: tests compare it with one rank, on 8 ranks at most; larger meshes run the same code.",
    "vllm": "executed: tests compare it with one rank, on CPU and 4 ranks at most. When an engine starts, the plugin "
    "also checks platform, drafter and expert settings, and may refuse what stands here.",
}


@dataclass(frozen=True)
class Asked:
    """A mesh and what is to run on it. Unknown counts are None, and nothing is refused for them.

    Attributes:
        experts: routed experts of a layer; 0 for a dense model.
        layers: decoder layers of the target.
        hybrid: the model has layers with a recurrent state.
    """

    mesh: Mesh
    frontend: Frontend
    expert_parallel: bool = False
    graph_mode: str = "none"
    experts: int | None = None
    layers: int | None = None
    hybrid: bool = False

    @property
    def several(self) -> bool:
        """Whether more than one rank runs a program of ours."""
        return self.mesh.pcp > 1 or self.mesh.pp > 1 or self.mesh.dp > 1


@dataclass(frozen=True)
class Combination:
    """One row: when it applies, and what each frontend does with it.

    ``why`` is the sentence of a refusal, formatted with ``{asked}`` and ``{mesh}``.
    """

    name: str
    applies: Callable[[Asked], bool]
    embedded: Status
    vllm: Status
    why: str = ""

    def status(self, frontend: Frontend) -> Status:
        """What ``frontend`` does with it."""
        return self.embedded if frontend == "embedded" else self.vllm


COMBINATIONS: tuple[Combination, ...] = (
    Combination("PCP", lambda a: a.mesh.pcp > 1, "executed", "executed"),
    Combination("PP", lambda a: a.mesh.pp > 1, "executed", "executed"),
    Combination("PP x PCP", lambda a: a.mesh.pp > 1 and a.mesh.pcp > 1, "executed", "executed"),
    Combination("DP, independent replicas", lambda a: a.mesh.dp > 1 and not a.expert_parallel, "executed", "executed"),
    Combination("DP x EP, in lockstep", lambda a: a.mesh.dp > 1 and a.expert_parallel, "executed", "executed"),
    Combination("DP x PCP", lambda a: a.mesh.dp > 1 and a.mesh.pcp > 1, "executed", "executed"),
    Combination("DP x PP", lambda a: a.mesh.dp > 1 and a.mesh.pp > 1, "executed", "allowed"),
    Combination("PCP x EP", lambda a: a.mesh.pcp > 1 and a.expert_parallel, "executed", "executed"),
    Combination(
        "TP beside PCP",
        lambda a: a.mesh.tp > 1 and not a.mesh.fold_on_tp,
        "refused",
        "allowed",
        "tp={mesh.tp} shards weights, which the embedded engine keeps whole on every rank; set tp=1, or set "
        "fold_on_tp=True to shard prefills over those ranks.",
    ),
    Combination(
        "fold_on_tp",
        lambda a: a.mesh.fold_on_tp,
        "executed",
        "refused",
        "fold_on_tp puts PCP on the tensor-parallel ranks, which vLLM's groups cannot express; leave it out and give "
        "PCP ranks of its own.",
    ),
    Combination(
        "external DP",
        lambda a: a.mesh.external_dp > 1,
        "refused",
        "allowed",
        "external_dp={mesh.external_dp} are engines that know nothing of each other; start each on its own, with "
        "external_dp=1.",
    ),
    Combination(
        "EP of a dense model",
        lambda a: a.expert_parallel and a.experts == 0,
        "refused",
        "refused",
        "expert_parallel is set, but the model has no routed experts; drop it.",
    ),
    Combination(
        "more stages than layers",
        lambda a: a.layers is not None and a.mesh.pp > a.layers,
        "refused",
        "refused",
        "pp={mesh.pp} stages need a layer each, and the model has {asked.layers}; lower pp.",
    ),
    Combination(
        "recurrent state on several ranks",
        lambda a: a.hybrid and a.several,
        "refused",
        "refused",
        "the model has layers with a recurrent state, which PCP ranks would each need whole and which other pipeline "
        "stages cannot roll back to the accepted tokens; {mesh} needs a model of attention layers only.",
    ),
    Combination(
        "EP with graphs",
        lambda a: a.expert_parallel and a.graph_mode != "none",
        "refused",
        "refused",
        "graph_mode={asked.graph_mode!r} would capture experts whose row counts differ from step to step with "
        "expert_parallel; set graph_mode='none', or drop expert_parallel.",
    ),
    Combination(
        "PP with graphs",
        lambda a: a.mesh.pp > 1 and a.graph_mode != "none",
        "refused",
        "allowed",
        "graph_mode={asked.graph_mode!r} captures whole bodies, and pp={mesh.pp} cuts them into stages; set "
        "graph_mode='none', or pp=1.",
    ),
)


def refusals(asked: Asked) -> tuple[str, ...]:
    """Every refusal of the table, a sentence each; empty when all of it may run."""
    return tuple(
        row.why.format(asked=asked, mesh=asked.mesh)
        for row in COMBINATIONS
        if row.status(asked.frontend) == "refused" and row.applies(asked)
    )


def rows_of(asked: Asked) -> tuple[tuple[str, Status], ...]:
    """Name and status of every row that applies."""
    return tuple((row.name, row.status(asked.frontend)) for row in COMBINATIONS if row.applies(asked))


def require_allowed(
    mesh: Mesh,
    *,
    frontend: Frontend,
    expert_parallel: bool = False,
    graph_mode: str = "none",
    experts: int | None = None,
    layers: int | None = None,
    hybrid: bool = False,
) -> None:
    """Refuse what the table refuses. Arguments as in :class:`Asked`.

    Raises:
        ConfigError: every refusal that applies, a line and a sentence each.
    """
    if frontend not in get_args(Frontend):
        raise ConfigError(f"unknown engine {frontend!r}; known: {', '.join(get_args(Frontend))}.")
    found = refusals(
        Asked(
            mesh, frontend, expert_parallel=expert_parallel, graph_mode=graph_mode, experts=experts, layers=layers,
            hybrid=hybrid,
        )
    )  # fmt: skip
    if found:
        raise ConfigError("\n".join(found))
