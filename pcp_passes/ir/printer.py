# SPDX-License-Identifier: Apache-2.0
"""The one printer: dumps, goldens, errors, the command line and fingerprints all read this text.

One node a line, in graph order::

    %all_gather_rows : f32[4*s72, 128] rank_major = pcp.all_gather_rows(%cat, 4, 'pcp')   # layers.0  by lower-reshards

What is called is written as in :mod:`pcp_passes.ir.targets`. A comment holds what does not change what runs: the module
that made the node, ``file.py:214``, the attention ``layer`` it serves, the pass it was made ``by`` or ``changed by``,
and ``because`` of what it runs replicated. Values are contiguous and on the CPU where an input does not say
``strides(1, 64)`` or ``on cuda``.

The text is deterministic and holds no address, path, device index or process-group object, so it is the same on every
rank of a group that runs the same model. :mod:`pcp_passes.ir.parsing.parser` reads it back.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from pcp_passes.ir import fakes, meta
from pcp_passes.ir.opaque import UnknownValue, UnreadConstant
from pcp_passes.ir.targets import target_text

DTYPES = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.bool: "b8",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
_SYMBOL = re.compile(r"\b[su]\d+\b")
CONSTANT_BYTES = 1 << 16
"""Constants up to this size are part of the text, by their digest."""

NodeName = Callable[[fx.Node], str]


def print_graph(
    graph: fx.GraphModule | fx.Graph, *, numbered: bool = False, placements: bool = True, comments: bool = True
) -> str:
    """The graph as text, one node a line.

    Args:
        graph: a graph or the module that holds it (needed to print constants held as attributes).
        numbered: name nodes ``%0, %1, ...`` instead of by their FX names: for comparing structure.
        placements: print where the rows of a value live.
        comments: end a line with where the node comes from: module, source line, layer and pass, where known.
    """
    nodes = (graph.graph if isinstance(graph, fx.GraphModule) else graph).nodes
    order = {node: index for index, node in enumerate(nodes)} if numbered else {}

    def name(node: fx.Node) -> str:
        return f"%{order[node]}" if numbered else f"%{node.name}"

    return "".join(_line(node, name, placements, comments) + "\n" for node in nodes)


def print_node(node: fx.Node) -> str:
    """One node as :func:`print_graph` prints it, without the comment."""
    return _line(node, lambda n: f"%{n.name}", placements=True, comments=False)


def type_text(value: object) -> str:
    """``f32[4*s72, 128]`` for a tensor, ``sym s72`` for a size, ``(a, b)`` for several; ``""`` for no value."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(str(size) for size in value.shape)
        return f"{dtype_text(value.dtype)}[{sizes}]"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f"sym {value}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(type_text(member) for member in value)})"
    if isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, UnknownValue):
        return value.text
    layer = fakes.opaque_text(value)
    if layer is not None:
        return f"layer {layer!r}"
    return "" if value is None else type(value).__name__


def dtype_text(dtype: torch.dtype) -> str:
    """Short name of a dtype: ``f32``, ``bf16``, ``float8_e4m3fn``."""
    return DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def graph_fingerprint(graph: fx.GraphModule | fx.Graph) -> str:
    """SHA-256 (hex) of the graph's rank-free text: equal on all ranks of a group, or their graphs differ.

    Symbols are renamed in order of appearance, and module comments are left out; neither changes what runs.
    """
    return hashlib.sha256(rank_free_text(graph).encode()).hexdigest()


def rank_free_text(graph: fx.GraphModule | fx.Graph) -> str:
    """The text behind :func:`graph_fingerprint`, for comparing two ranks line by line."""
    names: dict[str, str] = {}

    def rename(found: re.Match[str]) -> str:
        return names.setdefault(found.group(), f"t{len(names)}")

    return _SYMBOL.sub(rename, print_graph(graph, numbered=True, comments=False))


def _line(node: fx.Node, name: NodeName, placements: bool, comments: bool) -> str:
    if node.op == "output":
        return f"return {_argument(node.args[0], name)}"
    where = placement_text(node) if placements else ""
    kind = " ".join(filter(None, (type_text(meta.value(node)), _storage_text(node), where)))
    head = f"{name(node)} : {kind}" if kind else name(node)
    line = f"{head} = {_call(node, name)}"
    comment = comment_text(node) if comments else ""
    return f"{line}   # {comment}" if comment else line


def placement_text(node: fx.Node) -> str:
    """``shard(0)``; ``(shard(1), replicate)`` for an op with several results; ``replicate rows shard(1)`` for a
    replicated value whose consumers take its rows; ``""`` before placements are recorded."""
    known = meta.info(node)
    if known.placement is None:
        return ""
    where = f"({', '.join(map(str, known.results))})" if len(known.results) > 1 else str(known.placement)
    return f"{where} rows {known.rows}" if known.rows is not None else where


def comment_text(node: fx.Node) -> str:
    """Where a node comes from, in parts with two spaces between: module, ``file.py:214``, layer, pass, reason."""
    known = meta.info(node)
    module = meta.module_path(node)
    parts = [] if node.op == "placeholder" else [module, meta.source_line(node)]
    parts.append(f"layer {known.layer}" if known.layer and known.layer != module else "")
    parts.append(f"by {known.created_by}" if known.created_by else "")
    parts.append(f"changed by {known.changed_by}" if known.changed_by else "")
    parts.append(f"because {known.reason}" if known.reason else "")
    return "  ".join(filter(None, (" ".join(part.split()) for part in parts)))


def _storage_text(node: fx.Node) -> str:
    """Strides and device of what comes from outside, where they are unusual; those of other nodes follow from it."""
    held = meta.tensor(node)
    if held is None or node.op not in ("placeholder", "get_attr") or held.layout is not torch.strided:
        return ""
    strides = ", ".join(map(str, held.stride()))
    return " ".join(filter(None, (
        "" if fakes.is_row_major(held) else f"strides({strides})",
        "" if held.device.type == "cpu" else f"on {held.device.type}",
    )))  # fmt: skip


def _call(node: fx.Node, name: NodeName) -> str:
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return f"attribute {node.target}{_digest_text(node)}"
    arguments = [_argument(argument, name) for argument in node.args]
    arguments += [f"{key}={_argument(argument, name)}" for key, argument in node.kwargs.items()]
    if node.op == "call_method":
        return f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
    callee = f"module {node.target}" if node.op == "call_module" else target_text(node)
    return f"{callee}({', '.join(arguments)})"


def _digest_text(node: fx.Node) -> str:
    """Small constants are part of the text: a rank baked into one must show."""
    held = small_constant(node)
    if held is None:
        return ""
    return f" #{held.digest if isinstance(held, UnreadConstant) else constant_digest(held)}"


def small_constant(node: fx.Node) -> torch.Tensor | UnreadConstant | None:
    """What a ``get_attr`` node reads, when its contents are part of the text: no parameter, and small."""
    owner: Any = node.graph.owning_module
    if node.op != "get_attr" or owner is None:
        return None
    for part in str(node.target).split("."):
        owner = getattr(owner, part, None)
    if isinstance(owner, UnreadConstant):
        return owner
    if not isinstance(owner, torch.Tensor) or isinstance(owner, torch.nn.Parameter) or owner.is_meta:
        return None
    if fakes.fake_mode_of(owner) is not None or owner.numel() * owner.element_size() > CONSTANT_BYTES:
        return None
    return owner


def constant_digest(constant: torch.Tensor) -> str:
    """Twelve hex digits of the SHA-256 of a tensor's bytes in row-major order."""
    raw = constant.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:12]


def _argument(argument: Any, name: NodeName) -> str:
    if isinstance(argument, fx.Node):
        return name(argument)
    if isinstance(argument, (tuple, list)):
        inner = ", ".join(_argument(member, name) for member in argument)
        if isinstance(argument, list):
            return f"[{inner}]"
        return f"({inner},)" if len(argument) == 1 else f"({inner})"
    if isinstance(argument, dict):
        return "{" + ", ".join(f"{key!r}: {_argument(member, name)}" for key, member in argument.items()) + "}"
    if isinstance(argument, slice):
        parts = (
            (argument.start, argument.stop) if argument.step is None else (argument.start, argument.stop, argument.step)
        )
        return ":".join("" if part is None else _argument(part, name) for part in parts)
    if isinstance(argument, torch.dtype):
        return dtype_text(argument)
    if isinstance(argument, torch.device):
        return argument.type  # the index is this rank's, not the graph's
    if argument is None or isinstance(argument, (bool, int, float, complex, str, torch.layout, torch.memory_format)):
        return repr(argument) if isinstance(argument, str) else str(argument)
    if argument is Ellipsis:
        return "..."
    if isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f"sym {argument}"
    if isinstance(argument, UnknownValue):
        return argument.text
    layer = fakes.opaque_text(argument)
    return f"layer {layer!r}" if layer is not None else f"<{type(argument).__name__}>"
