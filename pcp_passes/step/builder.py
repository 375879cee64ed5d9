# SPDX-License-Identifier: Apache-2.0
"""Builds the plain step program: one device, global order. Passes make the program of P ranks from it.

Every node has a value (fake tensors whose sizes are ``sT``, ``sR``, ``sL``, ``sQ``, ``sB``; a sharded program adds
``sM``, ``sN`` and ``sS``) and is ``replicate`` until a pass says otherwise.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from pcp_passes.ir import meta
from pcp_passes.ir.parsing.lexer import Size
from pcp_passes.ir.placements import Replicate
from pcp_passes.ir.symbols import Symbols
from pcp_passes.speculative.contract import BodyModel, Drafter, TargetValues
from pcp_passes.step import ops
from pcp_passes.step.calls import BodyCall, HeadCall
from pcp_passes.step.inputs import CACHES, INPUTS, TABLE_BUFFER
from pcp_passes.step.values import state_value

_SIZES = {
    "input_ids": ("T",), "positions": ("T",), "slots": ("T",), "query_start_loc": ("R+1",), "seq_lens": ("R",),
    "requests": ("R",), "block_table_pool": ("Q", "B"), "logit_rows": ("L",), "cu_logits": ("R+1",),
    "draft_ids": ("R", "K"), "next_prefill": ("R",), "temperature": ("R",), "seeds": ("R",),
    "draft_logits": ("R", "K", "V"), TABLE_BUFFER: ("N", "B"),
}  # fmt: skip
_DTYPES = {
    "block_table_pool": torch.int32, TABLE_BUFFER: torch.int32, "temperature": torch.float64,
}  # fmt: skip


class StepBuilder:
    """A graph in the making; :attr:`inputs` are its placeholders by name.

    Args:
        target: the model whose tokens are sampled.
        drafter: adds its part through :meth:`call`, :meth:`body`, :meth:`query`, :meth:`head`.
        keep_draft_logits: return what drafts were sampled from, for exact rejection sampling with their distribution.
    """

    def __init__(self, target: BodyModel, drafter: Drafter, *, keep_draft_logits: bool) -> None:
        self.target, self.drafter = target, drafter
        self.keep_draft_logits = keep_draft_logits and drafter.steps > 0
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.symbols = Symbols()
        self.inputs: dict[str, fx.Node] = {}
        self._roles: dict[int, str] = {}
        for role, model in (("target", target), ("drafter", drafter.model)):
            if model is not None:
                self._add_model(role, model)
        constants = {"K": drafter.steps, "V": target.vocab_size}
        for name in (*INPUTS, TABLE_BUFFER, CACHES):
            node = self.inputs[name] = self.graph.placeholder(name)
            if name in _SIZES and not (name == "draft_logits" and not self.keep_draft_logits):
                shape = [constants.get(size) if size in constants else self.size(size) for size in _SIZES[name]]
                kind = _DTYPES.get(name, torch.int64)
                if name == "draft_logits" and drafter.model is not None:
                    kind = drafter.model.dtype
                meta.set_aten_value(node, self.empty(shape, kind))
                meta.set_placement(node, Replicate())

    def _add_model(self, role: str, model: BodyModel) -> None:
        self._roles[id(model)] = role
        held = nn.Module()
        for variant, body in model.bodies.items():
            held.add_module(variant, BodyCall(body, variant, model.layers))
        held.add_module("head", HeadCall(model.head, model.vocab_size, model.dtype))
        self.root.add_module(role, held)

    def size(self, text: str) -> Any:
        """``sT`` for ``T``; ``sR + 1`` for ``R+1``."""
        name, _, more = text.partition("+")
        tree: tuple[Any, ...] = ("name", f"s{name}")
        return self.symbols.value(Size(("+", tree, ("literal", int(more))) if more else tree, text))

    def empty(self, shape: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
        """A fake tensor of the program."""
        with self.symbols.mode:
            return torch.empty(tuple(shape), dtype=dtype)

    def _stated(self, node: fx.Node) -> fx.Node:
        state_value(node, self.root)
        meta.set_placement(node, Replicate())
        return node

    def call(self, op: ops.StepOp, *args: Any, name: str | None = None) -> fx.Node:
        """A step op."""
        return self._stated(self.graph.create_node("call_function", op, args, name=name or op.__name__))

    def part(self, several: fx.Node, index: int, name: str | None = None) -> fx.Node:
        """One result of a call with several."""
        return self._stated(self.graph.create_node("call_function", operator.getitem, (several, index), name=name))

    def body(self, model: BodyModel, variant: str, rows: Sequence[fx.Node], inputs: fx.Node) -> fx.Node:
        """A call of a body: ``rows`` are ids, positions and what else it takes a row of per token."""
        args, role = (*rows, inputs, self.inputs[CACHES]), self._roles[id(model)]
        return self._stated(self.graph.create_node("call_module", f"{role}.{variant}", args, name=role))

    def hidden_of(self, called: fx.Node) -> fx.Node:
        """The hidden states of a body call that may return more."""
        return self.part(called, 0, "hidden") if isinstance(meta.value(called), tuple) else called

    def head(self, model: BodyModel, hidden: fx.Node) -> fx.Node:
        """Logits ``[n, V]``."""
        path = f"{self._roles[id(model)]}.head"
        return self._stated(self.graph.create_node("call_module", path, (hidden,), name="logits"))

    def extra_head(self, name: str, module: nn.Module, rows: fx.Node) -> fx.Node:
        """Logits ``[n, V]`` of another head of the drafter, called ``drafter.<name>``."""
        model, held = self.drafter.model, self.root.get_submodule("drafter")
        assert model is not None, "a drafter without a model has no heads"
        if name not in dict(held.named_children()):
            held.add_module(name, HeadCall(module, model.vocab_size, model.dtype))
        return self._stated(self.graph.create_node("call_module", f"drafter.{name}", (rows,), name=name))

    def query(self, tables: fx.Node, begin: fx.Node, num_sampled: fx.Node, width: int) -> tuple[fx.Node, fx.Node]:
        """Positions and attention inputs of a query of ``width`` rows per request that begins at ``begin`` i64[R]."""
        made = self.call(ops.draft_query, tables, begin, num_sampled, width, self.inputs[CACHES])
        slots, starts, lengths, positions = (
            self.part(made, i, name) for i, name in enumerate(("slots", "starts", "lengths", "rows"))
        )
        inputs = self.call(ops.attention_inputs, slots, "replicated", tables, starts, lengths, positions, width)
        return positions, inputs

    def build(self) -> fx.GraphModule:
        """The whole program. Returns a module whose outputs are in the order of ``StepOutputs``."""
        given = self.inputs
        tables = self.call(
            ops.gather_block_tables, given["block_table_pool"], given["requests"], given[TABLE_BUFFER], name="tables"
        )
        inputs = self.call(
            ops.attention_inputs, given["slots"], "replicated", tables,
            given["query_start_loc"], given["seq_lens"], given["positions"],
        )  # fmt: skip
        called = self.body(self.target, "replicated", (given["input_ids"], given["positions"]), inputs)
        hidden = self.hidden_of(called)
        results = meta.value(called)
        aux = tuple(self.part(called, i, "aux") for i in range(1, len(results))) if isinstance(results, tuple) else ()
        logits = self.head(self.target, self.call(ops.select_rows, hidden, given["logit_rows"], name="sampled_hidden"))
        positions = self.call(ops.select_rows, given["positions"], given["logit_rows"], name="logit_positions")
        verified = self.call(
            ops.verify, logits, given["cu_logits"], given["draft_ids"],
            given["draft_logits"] if self.keep_draft_logits else None, given["temperature"], given["seeds"], positions,
        )  # fmt: skip
        parts = (self.part(verified, 0, "verified"), self.part(verified, 1, "accepted"))
        made = self.call(ops.outcome, *parts, given["cu_logits"], given["next_prefill"])
        sampled, num_sampled, num_rejected, next_token = (
            self.part(made, i, name) for i, name in enumerate(("sampled", "num_sampled", "num_rejected", "next_token"))
        )
        last = self.call(ops.last_valid, given["cu_logits"], num_rejected)
        last_rows = self.call(ops.select_rows, given["logit_rows"], last, name="last_rows")
        last_positions = self.call(ops.select_rows, given["positions"], last_rows, name="last_positions")
        values = TargetValues(hidden, aux, inputs, tables, last, last_rows, last_positions, num_sampled, next_token)
        drafted = self.drafter.extend(self, values)
        logprobs = self.call(ops.sampled_logprobs, logits, given["cu_logits"], sampled, name="logprobs")
        self.graph.output((sampled, num_sampled, num_rejected, next_token, drafted.drafts, drafted.logits, logprobs))
        gm = fx.GraphModule(self.root, self.graph, class_name="StepProgram")
        for name, held in self.root.named_children():
            setattr(gm, name, held)  # with the variants that only a pass will call
        gm.graph.eliminate_dead_code()  # what no drafter reads of the target's part
        gm.recompile()
        return gm
