# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a mesh compare before they start, and where in its graphs a rank's collectives stand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx

from pcp_passes.collectives import is_collective
from pcp_passes.distributed.agreement import SCOPE
from pcp_passes.engine.graphs import Choice
from pcp_passes.engine.options import EngineOptions
from pcp_passes.engine.programs import graphs_of
from pcp_passes.engine.request import ScheduledBatch
from pcp_passes.ir.printer import graph_fingerprint, print_graph
from pcp_passes.step.placement import body_of

if TYPE_CHECKING:
    from pcp_passes.step.program import StepProgram
    from pcp_passes.step.stages import StageProgram


def facts_of(given: StepProgram, stage: StageProgram | None, options: EngineOptions) -> dict[str, str]:
    """What decides a step, as short texts.

    Args:
        given: the program that the executor was given, with all weights.
        stage: what this rank runs of it; None where it runs all. Its graphs are compared within the stage.
    """
    facts = {
        "options": options.digest(), "mesh": str(options.mesh), "torch": torch.__version__,
        "weights": _weights(given.plain),
    }  # fmt: skip
    return facts | {name: graph_fingerprint(gm) for name, gm in _graphs(given, stage)}


def texts_of(given: StepProgram, stage: StageProgram | None) -> dict[str, str]:
    """The graphs as text, of which the first differing line is shown."""
    return {name: print_graph(gm) for name, gm in _graphs(given, stage)}


def _graphs(given: StepProgram, stage: StageProgram | None) -> Iterator[tuple[str, fx.GraphModule]]:
    if stage is None:
        yield from graphs_of(given)
        return
    for variant, gm in (("plain", stage.plain), ("sharded", stage.sharded)):
        if gm is not None:
            yield _scope(stage) + variant, gm
            for node in gm.graph.nodes:
                if (body := body_of(node)) is not None:
                    yield f"{_scope(stage)}{variant}.{node.target}", body.body


def _scope(stage: StageProgram) -> str:
    return f"stage {stage.index}{SCOPE}"


def _weights(gm: fx.GraphModule) -> str:
    """Hash of a few values of every parameter: enough to tell checkpoints apart, cheap for large ones."""
    digest = hashlib.sha256()
    for name, held in sorted(gm.state_dict().items()):
        flat = held.detach().flatten()
        some = flat[:: max(1, flat.numel() // 64)].double().cpu()
        digest.update(f"{name} {list(held.shape)} {held.dtype}".encode() + some.numpy().tobytes())
    return digest.hexdigest()[:16]


def known_of(batch: ScheduledBatch, choice: Choice) -> int:
    """63 bits over what a rank knows of a step and does with it.

    Beside :attr:`ScheduledBatch.digest`: the graph, how each request samples, and the tokens that are prefilled, which
    no length tells apart.
    """
    seen = (batch.digest, batch.dummy, choice.dispatch, choice.padded_tokens)
    digest = hashlib.sha256(repr((seen, [entry.request.params for entry in batch.entries])).encode())
    for entry in batch.entries:
        if entry.is_prefilling:
            tokens = entry.request.tokens[entry.start : entry.start + entry.length]
            digest.update(np.asarray(tokens, dtype=np.int64).tobytes())
    return int.from_bytes(digest.digest()[:8], "big") >> 1


def sources_of(program: StepProgram | StageProgram) -> Callable[[str, int], str]:
    """``(variant, n)`` to where its n-th collective stands: ``body target.sharded %all_gather_rows_3``."""
    known: dict[str, list[str]] = {}

    def source(variant: str, order: int) -> str:
        if variant not in known:
            graph: Any = getattr(program, variant, None)
            known[variant] = [] if graph is None else list(_collectives(graph, f"program {variant}"))
        found = known[variant]
        return found[order] if order < len(found) else ""

    return source


def _collectives(gm: fx.GraphModule, name: str) -> Iterator[str]:
    for node in gm.graph.nodes:
        if is_collective(node):
            yield f"{name} %{node.name}"
        elif (body := body_of(node)) is not None:
            yield from _collectives(body.body, f"body {node.target}")
