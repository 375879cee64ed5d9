# SPDX-License-Identifier: Apache-2.0
"""The rule table: how each op of the attention family treats token rows.

vLLM batches continuously: rows of many requests are stacked along one token dimension, so every op outside the
attention family must give each row the same result whatever the other rows are. Those ops need no rule. An op that
reads or writes the KV cache, or another state of the sequence, needs one; the default is refusal.

Keys are qualified op names, the same for an ``OpOverload`` and its ``OpOverloadPacket``. Nothing here imports vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pcp_passes.errors import ConfigError
from pcp_passes.ir import fakes, meta


@dataclass(frozen=True)
class CacheWrite:
    """Writes token rows into the cache at a slot mapping that lists the rows of all ranks, rank after rank."""

    rows: tuple[int, ...]
    """Argument positions that are token rows; each must be rank-major."""
    layout: str | None = None
    """Argument that states the layout of the rows as text, where there is one; whoever gathers the rows sets it."""


@dataclass(frozen=True)
class LocalQuery:
    """Attention of rank-local queries over the paged cache, with rank-local offsets, lengths and block-table rows."""

    query: int
    """Argument position of the queries, which must stay rank-local."""
    output: int | None
    """Argument position of the buffer the op writes; ``None`` when it returns its result."""
    writes_padding: bool = False
    """Whether the op defines its padded rows itself."""
    new_rows: tuple[int, ...] = ()
    """Argument positions of this step's keys and values; the op must not be the one that writes them to the cache."""
    cache_dep: str | None = None
    """Argument that carries the result of the cache write; absent when no write precedes the op."""


@dataclass(frozen=True)
class RowLocal:
    """Takes a layer name, or is named like attention, and still treats each token row alone."""

    reason: str


Rule = CacheWrite | LocalQuery | RowLocal

_ATTENTION = LocalQuery(query=0, output=3, new_rows=(1, 2), cache_dep="kv_cache_dummy_dep")
_PAGED = LocalQuery(query=0, output=None, cache_dep="dep")
_EXPERTS = RowLocal("routes and transforms each token alone; the experts' own communication is inside the op")

RULES: dict[str, Rule] = {
    "vllm::unified_kv_cache_update": CacheWrite(rows=(0, 1)),
    "vllm::unified_attention_with_output": _ATTENTION,
    "vllm::unified_mla_kv_cache_update": CacheWrite(rows=(0, 1)),
    "vllm::unified_mla_attention_with_output": _ATTENTION,
    "pcp::write_cache": CacheWrite(rows=(0, 1)),
    "pcp::paged_attend": LocalQuery(query=0, output=None),
    "pcp::kv_write": CacheWrite(rows=(0, 1), layout="layout"),
    "pcp::index_write": CacheWrite(rows=(0,), layout="layout"),
    "pcp::record_write": CacheWrite(rows=(0,), layout="layout"),
    "pcp::kv_attend": _PAGED,
    "pcp::mla_attend": _PAGED,
    "pcp::index_topk": _PAGED,
    "vllm::moe_forward": _EXPERTS,
    "vllm::moe_forward_shared": _EXPERTS,
    "vllm::transformers_moe_forward": _EXPERTS,
}

_RECURRENT = "carries a recurrent state from token to token: a rank needs the state left by the rank before it"
_CONVOLUTION = "convolves over neighbouring tokens: the first rows of a segment need rows of another rank"
_SPARSE = "scores queries against an index-key cache: its keys need a gather of their own"
_FUSED_WRITE = "writes the cache inside the op: its new rows cannot be gathered in front of it"

ABSENT: dict[str, str] = {
    "vllm::mamba_mixer": _RECURRENT,
    "vllm::mamba_mixer2": _RECURRENT,
    "vllm::linear_attention": _RECURRENT,
    "vllm::qwen_gdn_attention_core": _RECURRENT,
    "vllm::qwen_gdn_attention_core_fused_norm_packed": _RECURRENT,
    "vllm::gdn_attention_core_xpu": _RECURRENT,
    "vllm::cpu_gdn_attention_core": _RECURRENT,
    "vllm::olmo_hybrid_gdn_full_forward": _RECURRENT,
    "vllm::bailing_v3_kda_attention": _RECURRENT,
    "vllm::short_conv": _CONVOLUTION,
    "vllm::qwen4_exp_ple_short_conv": _CONVOLUTION,
    "vllm::dflash2_grouped_conv": _CONVOLUTION,
    "vllm::qwen4_exp_amd_ple_ngram_ids": "builds n-grams of neighbouring tokens, some of them on another rank",
    "pcp::index_keys": "stands for the index keys of all ranks: the pass lower-sparse-index has to replace it first",
    "vllm::sparse_attn_indexer": _SPARSE,
    "vllm::rocm_aiter_sparse_attn_indexer": _SPARSE,
    "vllm::qwen4_exp_qsa_with_output": _SPARSE,
    "vllm::qwen4_exp_qsa_prepare_with_output": _SPARSE,
    "vllm::deepseek_v4_attention": _FUSED_WRITE,
    "vllm::deepseek_v4_cpu_prepare_and_attn": _FUSED_WRITE,
    "vllm::hpc_rope_norm_forward": _FUSED_WRITE,
    "vllm::fused_rope_and_unified_kv_cache_update": _FUSED_WRITE,
    "vllm::fused_rope_unified_mla_kv_cache_update": _FUSED_WRITE,
    "vllm::fused_qk_norm_mrope_and_unified_kv_cache_update": _FUSED_WRITE,
    "vllm::maybe_populate_sink": "fills cache rows from weights outside the slot mapping",
    "torch::scaled_dot_product_attention": "attends over the rows of this rank alone, not over the paged cache",
    "aten::scaled_dot_product_attention": "attends over the rows of this rank alone, not over the paged cache",
}
"""Deliberately without a rule: the family members this package knows, each with the reason."""

ALONG_DIM = frozenset(
    "cumsum cumprod logcumsumexp cummax cummin roll flip diff sort argsort topk softmax log_softmax unique_consecutive"
    " kthvalue median mode searchsorted".split()
)
"""Ops that mix along one dimension and keep its size, so no shape tells: refused when it is the token dimension."""

_OWN_NAMESPACE = "pcp"
_PLAIN_NAMESPACES = frozenset({"aten", "prim", "prims", "torch", "operator", "math", "builtins", "rngprims"})
_SOUNDS_LIKE_ATTENTION = re.compile(
    r"attention|attn|_fa[234]_|kv_?cache|_cache_|:cache_|mamba|[_:]ssm|short_conv|[_:]gdn"
)
_LAYER_ARGUMENTS = ("layer_name", "layer", "prefix")


def register_rule(name: str, rule: Rule) -> None:
    """Add a rule for the op ``name`` (``"namespace::op"``), or replace the one it has.

    Raises:
        ConfigError: ``name`` is not qualified.
    """
    if "::" not in name:
        raise ConfigError(f"rule for {name!r}: found an unqualified op name; required 'namespace::op'")
    RULES[name] = rule


@contextmanager
def temporary_rule(name: str, rule: Rule | None) -> Iterator[None]:
    """:func:`register_rule` for the length of a ``with`` block; ``None`` takes the rule away."""
    before = RULES.pop(name, None)
    if rule is not None:
        register_rule(name, rule)
    try:
        yield
    finally:
        RULES.pop(name, None)
        if before is not None:
            RULES[name] = before


def op_name(node: fx.Node) -> str:
    """Qualified name of what a node calls: ``vllm::moe_forward``, ``torch::cat``, ``method::view``, or ``""``."""
    if node.op == "call_method":
        return f"method::{node.target}"
    if node.op != "call_function":
        return ""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    namespace = (getattr(target, "__module__", None) or "torch").split(".")[0]
    namespace = {"_operator": "operator"}.get(namespace, namespace)
    return f"{namespace}::{getattr(target, '__name__', type(target).__name__)}"


def rule_of(node: fx.Node) -> Rule | None:
    """The node's rule; ``None`` when it has none (row-local by the batching contract, or to be refused)."""
    return RULES.get(op_name(node))


def why_refused(node: fx.Node) -> str | None:
    """The reason a node without a rule may not stay in a sharded body, or ``None`` when it may."""
    name = op_name(node)
    if not name or name in RULES:
        return None
    if name in ABSENT:
        return ABSENT[name]
    namespace = name.partition("::")[0]
    if namespace in _PLAIN_NAMESPACES or namespace in (_OWN_NAMESPACE, "method"):
        return None
    if layer_of(node) is not None:
        return "takes a layer name, as ops of the attention family do, and has no rule"
    if _SOUNDS_LIKE_ATTENTION.search(name):
        return "is named like an op of the attention family, and has no rule"
    return None


def argument(node: fx.Node, position: int) -> Any:
    """The argument at a schema position, given by position or by keyword; ``None`` when it is absent."""
    if position < len(node.args):
        return node.args[position]
    name = _argument_name(node, position)
    return node.kwargs.get(name) if name else None


def set_argument(node: fx.Node, position: int, new: fx.Node) -> None:
    """Replace the argument at a schema position, where it was given."""
    if position < len(node.args):
        node.update_arg(position, new)
        return
    name = _argument_name(node, position)
    assert name is not None and name in node.kwargs, f"%{node.name} has no argument {position}"
    node.update_kwarg(name, new)


def set_named_argument(node: fx.Node, name: str, new: Any) -> None:
    """Set the argument of that name where it was given, else by keyword."""
    position = next(i for i, argument in enumerate(_schema_arguments(node)) if argument.name == name)
    if position < len(node.args):
        node.update_arg(position, new)
    else:
        node.update_kwarg(name, new)


def named_argument(node: fx.Node, name: str) -> Any:
    """The argument of that name, given by keyword or by position; ``None`` when it is absent."""
    if name in node.kwargs:
        return node.kwargs[name]
    position = next((i for i, argument in enumerate(_schema_arguments(node)) if argument.name == name), None)
    return node.args[position] if position is not None and position < len(node.args) else None


def mutated_arguments(node: fx.Node) -> list[fx.Node]:
    """Operands the node writes: by schema, by the ``_`` of an in-place method, ``out=``, or ``setitem``."""
    if node.op == "call_method":
        name = str(node.target)
        in_place = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
        return [node.args[0]] if in_place and isinstance(node.args[0], fx.Node) else []
    if node.op != "call_function":
        return []
    written = [named_argument(node, a.name) for a in _schema_arguments(node) if a.alias_info and a.alias_info.is_write]
    written.append(node.kwargs.get("out"))
    name = op_name(node).partition("::")[2]
    if name in ("setitem", "iadd", "imul", "isub", "itruediv") or (name.endswith("_") and not name.endswith("__")):
        written.append(node.args[0] if node.args else None)
    return [argument for argument in written if isinstance(argument, fx.Node)]


def layer_of(node: fx.Node) -> str | None:
    """The layer name an op was given, as a string or as a hoisted opaque object; ``None`` when it takes none."""
    for argument in (*node.args, *node.kwargs.values()):
        if isinstance(argument, fx.Node):
            hoisted = fakes.opaque_text(meta.value(argument))
            if hoisted is not None:
                return hoisted
    for name in _LAYER_ARGUMENTS:
        literal = named_argument(node, name)
        if isinstance(literal, str):
            return literal
    return None


def _argument_name(node: fx.Node, position: int) -> str | None:
    arguments = _schema_arguments(node)
    return arguments[position].name if position < len(arguments) else None


def _schema_arguments(node: fx.Node) -> list[Any]:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target._overload_names[0])
    return list(target._schema.arguments) if isinstance(target, torch._ops.OpOverload) else []
