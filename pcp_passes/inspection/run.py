# SPDX-License-Identifier: Apache-2.0
"""From a configuration to its report: build without weights, capture, rewrite, count, multiply."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

from pcp_passes.aten.gather_points import BALANCE
from pcp_passes.errors import ConfigError, Refusal
from pcp_passes.frontends.torch.plan import TokenPlan, build_plan
from pcp_passes.inspection.kernels import select_on_card
from pcp_passes.inspection.layers import LayerStack, find_stack, keep_one_of_each
from pcp_passes.inspection.ledger import Attend, Cost, Gather, Ledger, Place
from pcp_passes.inspection.report import (
    OUTSIDE,
    AttentionLine,
    ChoiceLine,
    FallbackLine,
    GatherLine,
    IndexerLine,
    KindLine,
    Memory,
    ModelReport,
    PartLine,
)
from pcp_passes.inspection.weightless import build_weightless, capture_model
from pcp_passes.passes.base import Note, PassContext
from pcp_passes.passes.tokens.insert_reshards import InsertReshards
from pcp_passes.passes.tokens.pipeline import Outputs, Rewritten, TokenOptions, rewrite_tokens

DTYPES = {
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "float16": torch.float16,
    "fp32": torch.float32, "float32": torch.float32,
}  # fmt: skip


def inspect_config(
    config: Mapping[str, Any],
    *,
    name: str = "",
    pcp: int = 2,
    tokens: int = 32768,
    layout: str = "zigzag",
    dtype: str = "bf16",
    outputs: Outputs = "last",
    full: bool = False,
    balance: float | None = None,
) -> tuple[ModelReport, fx.GraphModule]:
    """Inspect a model of which only the configuration is known.

    Args:
        config: in the format of transformers, with ``model_type``. Nothing of it is downloaded or run.
        name: what the report calls the model; its type by default.
        pcp: P.
        tokens: T, the length of the prompt that is counted, at least 2.
        layout: zigzag, contiguous or interleave.
        dtype: of weights and activations.
        outputs: the logits that are returned: of the last token, of all, or each rank its own.
        full: capture every layer instead of one of each kind.
        balance: operations that one byte of a gather is worth; by default those of a data-centre GPU.

    Returns:
        The report, and the rewritten graph (of the layers that were captured).

    Raises:
        ConfigError: an option or the configuration is wrong.
        Refusal: the model cannot be captured or not be sharded.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; accepted: {', '.join(DTYPES)}.")
    if tokens < 2:
        raise ConfigError(f"tokens is the length of a prompt, at least 2; found {tokens}.")
    plan = build_plan(tokens, pcp, layout)
    clock = _Clock()
    with clock("build"):
        built = build_weightless(config, DTYPES[dtype])
        model = built.model
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        parameters = sum(p.numel() for p in model.parameters())
        stack = find_stack(model, built.config)
        sizes = _layer_sizes(model, stack)
        if full:
            stack = stack.each_apart()
        elif stack.path:
            keep_one_of_each(model, built.config, stack)
    with clock("capture"):
        captured = capture_model(built, tokens, plan.num_rows)
    ledger = Ledger(stack)
    placeholders = captured.gm.graph.find_nodes(op="placeholder")
    ledger.name_inputs({n.name: given.source for n, given in zip(placeholders, captured.inputs, strict=True)})
    options = TokenOptions(outputs=outputs, balance=balance or BALANCE["cuda"])
    with clock("rewrite"):
        rewritten = rewrite_tokens(captured.gm, captured.space, PassContext(pcp), options=options, observers=(ledger,))
    counted = _Counted(stack, plan, ledger)
    report = ModelReport(
        model=name or str(config["model_type"]), model_type=str(config["model_type"]), dtype=dtype, pcp=pcp,
        layout=layout, outputs=outputs, tokens=tokens, rows=plan.num_rows, real_rows=plan.real, full=full,
        kinds=tuple(KindLine(k.label, k.times, k.layers[0], sizes[k.layers[0]]) for k in stack.kinds),
        parts=tuple(counted.parts()), gathers=tuple(counted.gathers()), attention=tuple(counted.attention()),
        indexers=tuple(counted.indexers()),
        fallbacks=tuple(counted.fallbacks()), choices=tuple(counted.choices(rewritten)),
        memory=counted.memory(weights, parameters), notes=tuple(counted.notes()), seconds=clock.spent,
    )  # fmt: skip
    return report, rewritten.gm


class _Clock:
    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    @contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.spent[step] = round(time.perf_counter() - began, 2)


def _layer_sizes(model: nn.Module, stack: LayerStack) -> list[int]:
    layers = model.get_submodule(stack.path).children() if stack.path else ()
    return [sum(p.numel() for p in layer.parameters()) for layer in layers]


class _Counted:
    """Turns what was counted in captured layers into lines that say how often each occurs."""

    def __init__(self, stack: LayerStack, plan: TokenPlan, ledger: Ledger) -> None:
        self._kinds, self._plan, self._ledger = stack.kinds, plan, ledger
        self._require_every_layer()

    def _require_every_layer(self) -> None:
        """A layer whose nodes are filed elsewhere would be left out when layers are multiplied."""
        seen = {number for number, _ in self._ledger.whole}
        missing = [kind.label for number, kind in enumerate(self._kinds) if number not in seen]
        if missing:
            raise Refusal(
                "the captured graph does not say which nodes belong to which layer.",
                [("found", f"no node of the layers {', '.join(missing)}"), ("next", "capture all layers: --full")],
            )

    def _times(self, place: Place) -> tuple[str, int]:
        """Kind of a place, and how often it occurs."""
        number = place[0]
        return (OUTSIDE, 1) if number is None else (self._kinds[number].label, self._kinds[number].times)

    def parts(self) -> Iterator[PartLine]:
        """One line for each module of each captured layer."""
        whole, ranks = self._ledger.whole, self._ledger.ranks
        for place in dict.fromkeys([*whole, *ranks]):
            yield PartLine(*self._times(place), place[1], whole.get(place, Cost()), ranks.get(place, {}))

    def gathers(self) -> Iterator[GatherLine]:
        """Collectives of one dtype in one module are one line."""
        groups: dict[tuple[Place, str, str], list[Gather]] = defaultdict(list)
        for gather in self._ledger.gathers:
            groups[gather.place, gather.op, gather.dtype].append(gather)
        for (place, op, dtype), members in groups.items():
            sent = sum(member.sent for member in members)
            yield GatherLine(*self._times(place), place[1], op, dtype, len(members), sent)

    def attention(self) -> Iterator[AttentionLine]:
        """One line for each attention of each captured layer."""
        for attend in self._ledger.attends:
            yield self._attention_line(attend, *self._times(attend.place))

    def _attention_line(self, attend: Attend, kind: str, times: int) -> AttentionLine:
        plan, sight = self._plan, attend.sight
        tokens, ranks = plan.num_tokens, plan.rows.shape[0]
        queries = tokens if attend.local else attend.rows
        # Which tokens the queries of an attention that runs whole are is known only when they are all.
        whole = sight.pairs(torch.arange(tokens)[None], tokens)[0] if queries == tokens else queries * tokens
        pairs = sight.pairs(plan.rows, tokens) if attend.local else [whole] * ranks
        return AttentionLine(
            kind, times, attend.place[1], str(sight), self._cached(attend), min(tokens, sight.reach or tokens),
            tuple(count * attend.pair for count in pairs), whole * attend.pair,
            attend.rows * attend.keys * attend.pair, queries * attend.keys * attend.pair,
        )  # fmt: skip

    def indexers(self) -> Iterator[IndexerLine]:
        """One line for each captured layer that attends to selected keys, in the order of the model."""
        for one in self._ledger.selects:
            number, module = one.place
            kind, times = self._times(one.place)
            layers = self._kinds[number].layers if number is not None else ()
            read, rows, tokens = one.indexer, self._plan.num_rows, self._plan.num_tokens
            selection = select_on_card(
                rows, tokens, topk=read.topk, heads=read.heads, dim=read.dim, store=read.store, layout="contiguous"
            )
            yield IndexerLine(
                kind, times, layers, module, "full" if one.full else "shared", read.heads, read.dim, read.topk,
                read.rope, read.store, selection if one.full else None, one.gathered, one.gathered * tokens,
                repeated=one.full and not one.gathered and self._plan.rows.shape[0] > 1,
            )  # fmt: skip

    def _cached(self, attend: Attend) -> int:
        """What its module gathers is what later tokens will read of a token."""
        number, module = attend.place
        sent = sum(
            gather.sent
            for gather in self._ledger.gathers
            if gather.rows and gather.place[0] == number and (gather.place[1] + ".").startswith(module + ".")
        )
        return sent // self._plan.num_rows

    def fallbacks(self) -> Iterator[FallbackLine]:
        """Ops that mix tokens; when all layers are captured, one line for each."""
        for found in self._ledger.fallbacks:
            yield FallbackLine(
                *self._times(found.place), found.node, found.op, found.module, found.source, found.reason,
                found.gathered, found.cost,
            )  # fmt: skip

    def choices(self, rewritten: Rewritten) -> Iterator[ChoiceLine]:
        """What ``insert-reshards`` noted."""
        ledger = self._ledger
        found = next(result for name, result in rewritten.passes.results if name == InsertReshards.name)
        for note in found.notes:
            if not isinstance(note, Note):
                continue
            named = [note.node, *re.findall(r"%(\w+)", note.text)]
            places = [ledger.places[name] for name in named if name in ledger.places]
            kinds = dict.fromkeys(self._times(place)[0] for place in places)
            yield ChoiceLine(tuple(kinds), places[0][1] if places else note.module, note.text)

    def notes(self) -> Iterator[str]:
        """What a reader of the figures has to know."""
        ledger = self._ledger
        if not any(held["sharded"].products for held in ledger.ranks.values() if "sharded" in held):
            yield "no matrix product is sharded: every rank runs all of them"
        gathering = {gather.place[0] for gather in ledger.gathers if gather.rows}
        for number in sorted({a.place[0] for a in ledger.attends if a.local and a.place[0] is not None} - gathering):
            kind = self._kinds[number]
            if kind.times > 1:
                yield (
                    f"the layers '{kind.label}' gather nothing: what they need whole is computed from what another "
                    "layer gathers, so figures multiplied by the number of layers are approximate (--full is exact)"
                )

    def memory(self, weights: int, parameters: int) -> Memory:
        """Bytes of one rank."""
        lines = list(self.attention())
        return Memory(
            weights, parameters, sum(line.cached * line.times for line in lines),
            sum(line.cached * line.kept * line.times for line in lines), self._ledger.live, self._ledger.live_whole,
        )  # fmt: skip
