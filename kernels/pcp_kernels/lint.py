# SPDX-License-Identifier: Apache-2.0
"""Barriers in generated texts: threads that exchange values through memory must wait for each other.

Triton's interpreter runs a program as one thread, so no test on it can see a missing barrier. Instead the text is
walked as it runs. Of every pointer that it loads from and stores to, which ``META["scratch"]`` must name, and of every
name derived from it:

* a load after a store needs ``tl.debug_barrier()`` between them, or it may read what was there before;
* a store after a load needs one as well, or a slower thread may read what it was not meant to.

A loop is walked twice, since its end meets its beginning. Helpers are walked with the pointers that they are given.
Two stores are not compared: generated kernels never write one element twice between barriers.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """A pair of accesses without a barrier between them."""

    line: int
    """Of the later access."""
    pointer: str
    later: str
    """``"load"`` or ``"store"``."""
    earlier_line: int

    def __str__(self) -> str:
        earlier = "store" if self.later == "load" else "load"
        return (
            f"line {self.line}: {self.later} through {self.pointer} after the {earlier} in line {self.earlier_line} "
            f"without tl.debug_barrier() between them"
        )


def missing_barriers(text: str) -> list[Finding]:
    """What is wrong with a generated ``text``, in order of lines; empty for a good one and for one without scratch.

    Raises:
        ValueError: no ``kernel``, no ``META``, scratch that is not what the text stores to and loads from, or atomics.
    """
    tree = ast.parse(text)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if "kernel" not in functions:
        raise ValueError("the text has no function `kernel`: it was not made by pcp_kernels.generate")
    arguments = [argument.arg for argument in functions["kernel"].args.args]
    meta = _meta(tree)
    scratch = set(meta["scratch"])
    if scratch - set(arguments):
        raise ValueError(
            f"META['scratch'] names {', '.join(sorted(scratch - set(arguments)))}; arguments of kernel: "
            f"{', '.join(arguments)}"
        )
    pointers = [name for name in arguments if meta["signature"][name].startswith("*")]
    walk = _Walk(functions)
    walk.body(functions["kernel"].body, {name: frozenset({name}) for name in pointers})
    if scratch != walk.both():
        raise ValueError(
            f"META['scratch'] names {', '.join(sorted(scratch)) or 'nothing'}; pointers that are loaded from and "
            f"stored to: {', '.join(sorted(walk.both())) or 'none'}"
        )
    return sorted(walk.findings, key=lambda finding: (finding.line, finding.pointer, finding.later))


def _meta(tree: ast.Module) -> dict[str, Any]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "META" for t in node.targets):
            found: dict[str, Any] = ast.literal_eval(node.value)
            return found
    raise ValueError("the text has no META: it was not made by pcp_kernels.generate")


Roots = frozenset[str]

ACCESSES = {"tl.load": "load", "tl.store": "store"}


@dataclass
class _Walk:
    functions: Mapping[str, ast.FunctionDef]
    findings: set[Finding] = field(default_factory=set)
    stored: dict[str, set[int]] = field(default_factory=dict)
    """Pointer -> lines of its stores since the last barrier, on some path."""
    loaded: dict[str, set[int]] = field(default_factory=dict)
    ever: dict[str, set[str]] = field(default_factory=lambda: {"load": set(), "store": set()})

    def both(self) -> set[str]:
        """Pointers that were loaded from and stored to."""
        return self.ever["load"] & self.ever["store"]

    def body(self, statements: list[ast.stmt], names: dict[str, Roots]) -> None:
        for statement in statements:
            self.statement(statement, names)

    def statement(self, node: ast.stmt, names: dict[str, Roots]) -> None:
        match node:
            case ast.For() | ast.While():
                self.expression(node.iter if isinstance(node, ast.For) else node.test, names)
                before, outside = self.state(), dict(names)
                for _ in range(2):
                    self.body(node.body, names)
                self.join(before)
                _merge(names, outside)
            case ast.If():
                self.expression(node.test, names)
                before, other = self.state(), dict(names)
                self.body(node.body, names)
                taken = self.state()
                self.stored, self.loaded = before
                self.body(node.orelse, other)
                self.join(taken)
                _merge(names, other)
            case ast.Assign() | ast.AugAssign() | ast.AnnAssign():
                if node.value is not None:
                    self.expression(node.value, names)
                    roots = self.roots(node.value, names)
                    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                        for part in ast.walk(target):
                            if isinstance(part, ast.Name):
                                kept = (
                                    names.get(part.id, frozenset()) if isinstance(node, ast.AugAssign) else frozenset()
                                )
                                names[part.id] = roots | kept
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self.expression(child, names)

    def expression(self, node: ast.expr, names: dict[str, Roots]) -> None:
        """Record the accesses in ``node``, operands before the call that uses them."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.expression(child, names)
            elif isinstance(child, ast.keyword):
                self.expression(child.value, names)
        if not isinstance(node, ast.Call):
            return
        called = ast.unparse(node.func)
        if called == "tl.debug_barrier":
            self.stored, self.loaded = {}, {}
        elif called in self.functions:
            helper = self.functions[called]
            given = dict(zip((a.arg for a in helper.args.args), node.args, strict=False))
            given.update({k.arg: k.value for k in node.keywords if k.arg is not None})
            self.body(helper.body, {name: self.roots(value, names) for name, value in given.items()})
        elif called in ACCESSES:
            self.access(ACCESSES[called], node, names)
        elif called.startswith("tl.atomic") and self.roots(node, names):
            raise ValueError(f"line {node.lineno}: {called} is not understood; use loads, stores and barriers")

    def access(self, kind: str, node: ast.Call, names: dict[str, Roots]) -> None:
        pointer = node.args[0] if node.args else next(k.value for k in node.keywords if k.arg == "pointer")
        mine, others = (self.loaded, self.stored) if kind == "load" else (self.stored, self.loaded)
        for root in self.roots(pointer, names):
            earlier = others.get(root)
            if earlier:
                self.findings.add(Finding(node.lineno, root, kind, min(earlier)))
            mine.setdefault(root, set()).add(node.lineno)
            self.ever[kind].add(root)

    def roots(self, node: ast.AST, names: dict[str, Roots]) -> Roots:
        """Pointers that the value of ``node`` is derived from; what was loaded is no pointer."""
        if isinstance(node, ast.Name):
            return names.get(node.id, frozenset())
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"tl.load", *self.functions}:
            return frozenset()
        return frozenset().union(*(self.roots(child, names) for child in ast.iter_child_nodes(node)))

    def state(self) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
        copies = ({root: set(lines) for root, lines in held.items()} for held in (self.stored, self.loaded))
        stored, loaded = copies
        return stored, loaded

    def join(self, other: tuple[dict[str, set[int]], dict[str, set[int]]]) -> None:
        for held, more in zip((self.stored, self.loaded), other, strict=True):
            for root, lines in more.items():
                held.setdefault(root, set()).update(lines)


def _merge(names: dict[str, Roots], other: Mapping[str, Roots]) -> None:
    """Let each name stand for what it may stand for on either path."""
    for name, roots in other.items():
        names[name] = names.get(name, frozenset()) | roots
