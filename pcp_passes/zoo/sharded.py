# SPDX-License-Identifier: Apache-2.0
"""Zoo models on simulated ranks, through the public front end, and what that cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from pcp_passes.aten.costs import flops_of, is_product
from pcp_passes.aten.decision import REPLICATE
from pcp_passes.collectives import Collective
from pcp_passes.frontends.torch.decorator import ContextParallel
from pcp_passes.frontends.torch.executors import Program, SimulatedExecutor
from pcp_passes.frontends.torch.options import TorchOptions
from pcp_passes.frontends.torch.plan import TokenPlan
from pcp_passes.frontends.torch.sharded import Variant
from pcp_passes.ir import meta, rules
from pcp_passes.passes import PassContext
from pcp_passes.passes.pipeline import Event
from pcp_passes.passes.tokens.insert_reshards import InsertReshards
from pcp_passes.passes.tokens.pipeline import TokenOptions, rewrite_tokens
from pcp_passes.passes.tokens.propagate_placements import PropagatePlacements
from pcp_passes.zoo.check import Ran
from pcp_passes.zoo.models import Inputs, call, logits_of, make_inputs

MEASURED_LENGTH, MEASURED_PCP = 64, 4


@dataclass(frozen=True)
class Fallback:
    """An op on activations that every rank runs on all tokens."""

    node: str
    op: str
    module: str
    source: str
    reason: str
    flops: int

    def __str__(self) -> str:
        return f"{self.op} in {self.module or '(model)'} ({self.source}): {self.reason}"


@dataclass(frozen=True)
class Work:
    """Where the products of one call run. FLOPs of matrix products, convolutions and attention only.

    Attributes:
        tokens, pcp: T and P of the call.
        whole: FLOPs of the model in eager mode.
        rank: FLOPs of one rank in the rewritten graphs, counted while it ran; padded rows included.
        sharded: of the rewritten graphs, all ranks together, on rows.
        replicated: repeated on every rank since an op fell back, or reads no activation.
        recomputed: repeated on every rank since that is cheaper than gathering the result.
        collectives, sent: of one call, and the bytes that each rank brings to them.
    """

    tokens: int
    pcp: int
    whole: int
    rank: int
    sharded: int
    replicated: int
    recomputed: int
    collectives: int
    sent: int

    @property
    def share(self) -> float:
        """Sharded products among all but the recomputed ones; 0 when there are none."""
        counted = self.sharded + self.replicated
        return self.sharded / counted if counted else 0.0


@dataclass(frozen=True)
class Account:
    """What the front end did to a model.

    Attributes:
        graphs: Dynamo graphs of one model that hold tokens; more than one where there are graph breaks.
        compilations: over all lengths, for one number of ranks.
        whole_graphs: why graphs run whole on every rank.
        fallbacks: ops on activations that are replicated.
        choices: what each gather choice printed.
        work: at T=64 and P=4; ``None`` when that was not asked for.
    """

    graphs: int = 0
    compilations: int = 0
    whole_graphs: tuple[str, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()
    choices: tuple[str, ...] = ()
    work: Work | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "graphs": self.graphs,
            "compilations": self.compilations,
            "whole_graphs": list(self.whole_graphs),
            "fallbacks": [asdict(fallback) for fallback in self.fallbacks],
            "choices": list(self.choices),
            "work": None if self.work is None else {**asdict(self.work), "share": self.work.share},
        }


@dataclass(frozen=True, eq=False)
class ZooExecutor(SimulatedExecutor):
    """Simulated ranks that can be counted, and whose plan can be spoilt: a sabotage of the real run.

    Attributes:
        switches: what the next calls do.
        programs: those that ran, with their FLOPs and collectives, while counting.
    """

    switches: Switches = field(default_factory=lambda: Switches())
    programs: list[tuple[Program, int, list[Collective]]] = field(default_factory=list)

    def run(self, program: Program, arguments: Any, plan: TokenPlan) -> Any:
        """Run all ranks; when spoilt, rows come back one place off."""
        given = replace(plan, restore=plan.restore.roll(1)) if self.switches.spoil else plan
        if not self.switches.count:
            return super().run(program, arguments, given)
        # Around the program and not around the model: Dynamo runs nothing compiled while a dispatch mode is on.
        with FlopCounterMode(display=False, custom_mapping=_formulas()) as counter:
            outputs = super().run(program, arguments, given)
        sent = list(self.logs[0].entries) if self.logs else []
        self.programs.append((program, int(counter.get_total_flops()) // self.pcp, sent))
        return outputs


@dataclass
class Switches:
    """Of a :class:`ZooExecutor`."""

    spoil: bool = False
    count: bool = False


class ShardedModels:
    """Runs models on simulated ranks; compiles one only once for each number of ranks.

    Args:
        options: fields of :class:`~pcp_passes.frontends.torch.options.TorchOptions`.
    """

    def __init__(self, **options: Any) -> None:
        self.options = TorchOptions.parse({"tokens": {"input_ids": 1}, **options})
        self._held: dict[tuple[int, int], ContextParallel] = {}
        self._executors: dict[tuple[int, int], ZooExecutor] = {}

    def __call__(self, model: nn.Module, inputs: Inputs, pcp: int) -> Ran:
        """A :data:`~pcp_passes.zoo.check.Runner`."""
        return Ran(logits_of(self.wrapped(model, pcp)(**inputs)), self.is_sharded(model, pcp))

    def spoilt(self, model: nn.Module, inputs: Inputs, pcp: int) -> Ran:
        """The same with every restore one row off, on as many ranks as the model is compiled for already."""
        pcp = next((ranks for known, ranks in reversed(self._held) if known == id(model)), pcp)
        self.wrapped(model, pcp)
        switches = self._executors[id(model), pcp].switches
        switches.spoil = True
        try:
            return self(model, inputs, pcp)
        finally:
            switches.spoil = False

    def wrapped(self, model: nn.Module, pcp: int) -> ContextParallel:
        """The model on ``pcp`` ranks; graph breaks are allowed."""
        key = id(model), pcp
        if key not in self._held:
            torch._dynamo.reset()  # what models of one class share would else count as one function's recompilations
            self._held.clear()
            self._executors[key] = ZooExecutor(pcp)
            self._held[key] = ContextParallel(model, self.options, self._executors[key], fullgraph=False)
        return self._held[key]

    def is_sharded(self, model: nn.Module, pcp: int) -> bool:
        """Whether any graph of the model holds rows."""
        return any(_holds_rows(variant) for variant in self._variants(model, pcp))

    def account(self, model: nn.Module, pcp: int, *, measure: bool = False) -> Account:
        """What has been done for ``pcp`` ranks so far, and what one more call costs.

        ``measure`` runs the model once more, on 64 tokens.
        """
        backend = self.wrapped(model, pcp).sharded.backend
        work = self._measure(model, pcp) if measure else None
        looks = [_Look.at(variant, pcp) for variant in self._variants(model, pcp) if variant.rewritten]
        return Account(
            graphs=len(backend.graphs),
            compilations=backend.compilations,
            whole_graphs=(*backend.replicated, *self._unsplit(model, pcp)),
            fallbacks=tuple(dict.fromkeys(found for look in looks for found in look.fallbacks)),
            choices=tuple(dict.fromkeys(choice for look in looks for choice in look.choices)),
            work=work,
        )

    def _unsplit(self, model: nn.Module, pcp: int) -> Iterator[str]:
        """Graphs that hold tokens and were run whole all the same, as ``unknown="replicate"`` allows."""
        for variant in self._variants(model, pcp):
            if variant.captured is None:
                yield "cannot be captured"
            elif variant.rewritten is None:
                yield "holds for one length only: " + "; ".join(variant.captured.space.specialised())

    def _measure(self, model: nn.Module, pcp: int) -> Work:
        inputs = make_inputs(model, MEASURED_LENGTH)
        wrapped = self.wrapped(model, pcp)
        executor = self._executors[id(model), pcp]
        executor.programs.clear()
        executor.switches.count = True
        try:
            wrapped(**inputs)
        finally:
            executor.switches.count = False
        ran = executor.programs
        if any(_tokens_at(variant) != MEASURED_LENGTH for variant in self._ran(model, pcp)):
            self._held.clear()  # costs are counted at the length that a graph was made from: make it anew
            return self._measure(model, pcp)
        looks = [_Look.at(variant, pcp) for variant in self._ran(model, pcp)]
        sent = [collective for _, _, collectives in ran for collective in collectives]
        return Work(
            tokens=MEASURED_LENGTH, pcp=pcp, whole=count_flops(lambda: call(model, inputs)),
            rank=sum(flops for _, flops, _ in ran), sharded=sum(look.sharded for look in looks),
            replicated=sum(look.replicated for look in looks), recomputed=sum(look.recomputed for look in looks),
            collectives=len(sent), sent=sum(collective.bytes for collective in sent),
        )  # fmt: skip

    def _ran(self, model: nn.Module, pcp: int) -> Iterator[Variant]:
        """Variants of the counted call, as often as they ran."""
        for program, _, _ in self._executors[id(model), pcp].programs:
            yield from (variant for variant in self._variants(model, pcp) if variant.program is program)

    def _variants(self, model: nn.Module, pcp: int) -> Iterator[Variant]:
        held = self._held.get((id(model), pcp))
        for graph in held.sharded.backend.graphs if held else ():
            yield from graph.variants


def _tokens_at(variant: Variant) -> int:
    assert variant.captured is not None, "a graph that was not captured has no rows to count"
    return int(variant.captured.space.tokens.node.hint)


def _holds_rows(variant: Variant) -> bool:
    if variant.rewritten is None:
        return False
    calls = (node for node in variant.rewritten.gm.graph.nodes if node.op == "call_function")
    return any(_on_rows(node) for node in calls)


def _on_rows(node: fx.Node) -> bool:
    return meta.placement(node) not in (None, REPLICATE)


def count_flops(run: Any) -> int:
    """FLOPs of all products that ``run()`` executes in this process."""
    with FlopCounterMode(display=False, custom_mapping=_formulas()) as counter:
        run()
    return int(counter.get_total_flops())


def _formulas() -> dict[Any, Any]:
    """Of products that PyTorch's counter does not know."""

    def attention(q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        batch, heads, rows, width = q
        return 2 * int(batch * heads * rows * k[-2] * (width + v[-1]))

    def grouped(rows: Any, weights: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return 2 * int(rows[0] * rows[1] * weights[-1])

    found: dict[Any, Any] = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention}
    for library, name in (("aten", "_grouped_mm"), ("transformers", "grouped_mm_fallback")):
        op = getattr(getattr(torch.ops, library), name, None)
        if op is not None:
            found[op] = grouped
    return found


@dataclass
class _Look:
    """One variant, rewritten again with an observer: the graph that runs does not say what was a fallback's doing."""

    sharded: int = 0
    replicated: int = 0
    recomputed: int = 0
    fallbacks: list[Fallback] = field(default_factory=list)
    choices: list[str] = field(default_factory=list)
    _rows: set[str] = field(default_factory=set)

    @classmethod
    def at(cls, variant: Variant, pcp: int) -> _Look:
        """Look at a variant; sizes are those of the call that made it."""
        look = cls()
        captured = variant.captured
        assert captured is not None, "a rewritten graph was captured"
        inputs = captured.gm.graph.find_nodes(op="placeholder")
        assume = tuple((inputs[guard.index].name, guard.assumption) for guard in variant.assumed)
        rewrite_tokens(
            captured.gm, captured.space, PassContext(pcp), observers=(look,),
            options=TokenOptions(unknown="replicate", assume=assume),
        )  # fmt: skip
        return look

    def observe(self, event: Event) -> None:
        """The pipeline's observer seam."""
        if event.name == PropagatePlacements.name:
            self._placed(event.graph)
        if event.name == InsertReshards.name and event.result is not None:
            self.choices += map(str, event.result.notes)
            self._count(event.graph, event.ctx.pcp)

    def _placed(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            known = meta.info(node)
            if _on_rows(node):
                self._rows.add(node.name)
            if known.reason:
                self.fallbacks.append(
                    Fallback(node.name, rules.op_name(node), meta.module_path(node), meta.source_line(node),
                             known.reason, flops_of(node))
                )  # fmt: skip

    def _count(self, graph: fx.Graph, pcp: int) -> None:
        for node in graph.nodes:
            if node.op != "call_function" or not is_product(node):
                continue
            if _on_rows(node):
                self.sharded += pcp * flops_of(node)
            elif node.name in self._rows or meta.info(node).created_by == InsertReshards.name:
                self.recomputed += flops_of(node)
            else:
                self.replicated += flops_of(node)
