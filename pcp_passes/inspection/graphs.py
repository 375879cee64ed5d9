# SPDX-License-Identifier: Apache-2.0
"""What CUDA graphs of a model's bodies would hold, from its configuration alone: pieces, cuts, buckets, static inputs.

Nothing runs and no weight is read: parameters are on the ``meta`` device, so that a model which names a CPU is found.
Of the layers as many are captured as show every pair of neighbours once, for pieces reach over the border of two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from pcp_passes.engine.requirements import RECORDS
from pcp_passes.errors import ConfigError
from pcp_passes.inspection.layers import LayerStack, find_stack, keep_layers
from pcp_passes.inspection.run import DTYPES
from pcp_passes.inspection.step import DRAFTERS, capture_mtp, model_on_meta
from pcp_passes.passes.base import PassContext
from pcp_passes.piecewise.buckets import Buckets, derive_buckets
from pcp_passes.piecewise.prepare import Prepared, prepare
from pcp_passes.piecewise.report import BodyReport, Weigh, report_body
from pcp_passes.piecewise.static import StaticInputs
from pcp_passes.speculative.mtp import MTP
from pcp_passes.speculative.plain import NoDrafter
from pcp_passes.step.program import StepProgram

PAGE = 16
"""Tokens of a block, which decides the columns of a block table."""

STATIC_IS_NOT_CAPTURE = (
    "this is a static check: that a graph could hold the pieces, not that one did. No GPU run is recorded here; what "
    "has been captured on which card stands in the documentation"
)


@dataclass(frozen=True)
class ModelGraphs:
    """Graphs of one model.

    Attributes:
        layers, captured: of the target, all of them and those that were captured.
        bodies: of target and drafter.
        buckets: for ``budget`` and ``max_requests``.
        static_rows: rows of the largest static input.
        static_bytes: of all static inputs of a rank, shared ones once.
        attention_bytes: of these, slots, positions, lengths and block tables for prompts of ``max_len`` tokens.
    """

    model: str
    drafter: str
    steps: int
    pcp: int
    dtype: str
    layers: int
    captured: int
    budget: int
    max_requests: int
    max_len: int
    bodies: tuple[BodyReport, ...]
    buckets: Buckets
    static_rows: int
    static_bytes: int
    attention_bytes: int

    @property
    def distinct(self) -> int:
        """Kinds of pieces over all bodies: what is compiled for each bucket, or once for all."""
        return len({line.key for body in self.bodies for line in body.pieces})

    @property
    def capturable(self) -> bool:
        """Whether nothing keeps a piece from being captured."""
        return not any(body.faults for body in self.bodies)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        bodies = [body.to_json() for body in self.bodies]
        told = {"distinct_pieces": self.distinct, "capturable": self.capturable, "gpu_runs": STATIC_IS_NOT_CAPTURE}
        return {**asdict(self), "bodies": bodies, **told}


def inspect_graphs_config(
    config: Mapping[str, Any],
    *,
    name: str = "",
    drafter: str = "none",
    steps: int = 3,
    pcp: int = 2,
    dtype: str = "bf16",
    budget: int = 8192,
    max_requests: int = 256,
    full: bool = False,
) -> ModelGraphs:
    """Split the bodies of a configuration and look at what CUDA graphs would hold.

    Args:
        config: in the format of transformers, with ``model_type``.
        name: what the report calls the model; its type by default.
        drafter: ``none``, or ``mtp``, the next-token module of DeepSeek and GLM models.
        steps: K, with a drafter.
        pcp: P.
        dtype: of weights and activations, as for :func:`pcp_passes.inspection.run.inspect_config`.
        budget: tokens of a step.
        max_requests: requests that run at a time.
        full: capture every layer.

    Raises:
        ConfigError: an option or the configuration is wrong.
        Refusal: the model cannot be captured, or its bodies cannot be split.
    """
    if drafter not in ("none", *DRAFTERS):
        raise ConfigError(f"unknown drafter {drafter!r}; accepted: none, {', '.join(DRAFTERS)}")
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; accepted: {', '.join(DTYPES)}.")
    drafts = steps if drafter != "none" else 0
    buckets = derive_buckets(budget=budget, pcp=pcp, max_requests=max_requests, steps=drafts)
    from pcp_passes.frontends.transformers.target import load_target

    model = model_on_meta(config, DTYPES[dtype])
    max_len = int(getattr(model.config, "max_position_embeddings", budget))
    stack, count = find_stack(model, model.config), int(model.config.num_hidden_layers)
    kept = tuple(range(count)) if full or not stack.path else stack.every_transition()
    if len(kept) < count:
        keep_layers(model, model.config, stack, kept)
    ctx = PassContext(pcp)
    target = load_target(model, ctx=ctx)
    module = capture_mtp(model, ctx) if drafts else None
    program = StepProgram(target, NoDrafter() if module is None else MTP(module, drafts), pcp=pcp)
    prepared = prepare(program.storing(RECORDS["auto"]))
    rows = max(buckets.max_rows, buckets.max_requests * (1 + drafts))
    static = StaticInputs(
        rows, buckets.max_requests, -(-max_len // PAGE), "meta", prepared.slot_types(), prepared.shared
    )
    return ModelGraphs(
        name or str(config["model_type"]), drafter, drafts, pcp, dtype, count, len(kept), budget, max_requests, max_len,
        _bodies(prepared, weights(stack, kept), kept), buckets, rows, static.bytes,
        sum(buffer.bytes for buffer in static.attention.buffers()),
    )  # fmt: skip


def _bodies(prepared: Prepared, target: Weigh, kept: Sequence[int]) -> tuple[BodyReport, ...]:
    found: dict[str, BodyReport] = {}
    for body in prepared.bodies.values():
        name = f"{body.role}.{body.call.variant}"
        told: dict[str, Any] = {"weigh": target, "number": kept.__getitem__} if body.role == "target" else {}
        if name not in found:
            found[name] = report_body(name, body.call.body, body.split, **told)
    return tuple(found.values())


def weights(stack: LayerStack, kept: Sequence[int]) -> Weigh:
    """How often the model has what a body of the layers ``kept`` has once: in a layer, or at the border of two."""
    kind = {number: kind.label for kind in stack.kinds for number in kind.layers}
    if not kind:
        return lambda before, after: Fraction(1)
    all_of, here = Counter(kind.values()), Counter(kind[number] for number in kept)
    borders = Counter(pairwise(kind[number] for number in sorted(kind)))
    kept_borders = Counter(pairwise(kind[number] for number in kept))

    def weigh(before: int | None, after: int | None) -> Fraction:
        if before is None or after is None:
            return Fraction(1)
        first, second = kind[kept[before]], kind[kept[after]]
        if before == after:
            return Fraction(all_of[first], here[first])
        return Fraction(borders[first, second], kept_borders[first, second])

    return weigh
