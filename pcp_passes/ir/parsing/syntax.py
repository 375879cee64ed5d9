# SPDX-License-Identifier: Apache-2.0
"""The grammar of printed graphs: text to statements, without PyTorch and without looking anything up.

::

    statement = "%" name [":" kind] "=" call ["   # " comment]   |   "return" argument
    call      = "input" | "attribute" path ["#" digest] | "module" path arguments | "%" name "." method arguments
              | target arguments
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pcp_passes.ir.parsing.types import Kind, TypeReader, Word

_SOURCE = re.compile(r"[^\s:]+:\d+\Z")


@dataclass(frozen=True)
class Ref:
    """``%name``."""

    name: str


@dataclass(frozen=True)
class Comment:
    """Where a node comes from."""

    module: str = ""
    source: str = ""
    layer: str = ""
    by: str = ""
    changed_by: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Statement:
    """One line. ``op`` is the fx opcode; ``name`` is empty for ``return``."""

    line: int
    text: str
    """The line without its comment."""
    name: str
    op: str
    target: str
    kind: Kind = field(default_factory=Kind)
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    digest: str = ""
    comment: Comment = field(default_factory=Comment)

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the nodes it reads, each once, in order."""
        return tuple(dict.fromkeys(_names((self.args, self.kwargs))))

    @property
    def called(self) -> str:
        """What it calls, for counting: ``aten.add.Tensor``, ``.view``, ``input``."""
        words = {"placeholder": "input", "get_attr": "attribute", "output": "return", "call_module": "module"}
        return words.get(self.op, f".{self.target}" if self.op == "call_method" else self.target)


def _names(held: Any) -> Iterator[str]:
    if isinstance(held, Ref):
        yield held.name
    elif isinstance(held, (tuple, list)):
        for member in held:
            yield from _names(member)
    elif isinstance(held, dict):
        yield from _names(list(held.values()))
    elif isinstance(held, slice):
        yield from _names((held.start, held.stop, held.step))


def read_statements(text: str, where: str = "graph") -> list[Statement]:
    """Every statement of a printed graph.

    Args:
        text: what ``print_graph`` gave.
        where: what to call the text in an error: a file name.

    Raises:
        DumpError: a line is no statement; it names ``where``, the line, what was found and what is required.
    """
    return [_Line(line, number, where).statement() for number, line in enumerate(text.splitlines(), start=1)]


class _Line(TypeReader):
    """A recursive-descent reader of one line."""

    def statement(self) -> Statement:
        comment = self.tokens.pop() if self.tokens and self.tokens[-1].kind == "comment" else None
        body = self.line[: comment.at] if comment else self.line
        if self.peek().text == "return":
            self.next += 1
            made = Statement(self.row, body, "", "output", "output", args=(self.argument(),))
        else:
            made = self._assignment(body, _comment(comment.text[5:]) if comment else Comment())
        if self.peek().kind != "end":
            raise self.error(f"found {self.peek().text!r} after the end of the statement")
        return made

    def _assignment(self, body: str, comment: Comment) -> Statement:
        token = self.take()
        if token.kind != "node" or "." in token.text:
            raise self.error(f"found {token.text!r}; required '%name = ...' or 'return ...'")
        kind = Kind()
        if self.at(":"):
            self.next += 1
            kind = self.kind()
        self.expect("=")
        op, target, args, kwargs, digest = self._call()
        return Statement(self.row, body, token.text[1:], op, target, kind, args, kwargs, digest, comment)

    def _call(self) -> tuple[str, str, tuple[Any, ...], dict[str, Any], str]:
        token = self.take()
        if token.kind == "node" and "." in token.text:
            name, _, method = token.text[1:].partition(".")
            args, kwargs = self._arguments()
            return "call_method", method, (Ref(name), *args), kwargs, ""
        if token.kind != "word":
            raise self.error(f"found {token.text!r}; required what the node calls")
        if token.text == "input":
            return "placeholder", "input", (), {}, ""
        if token.text == "attribute":
            path = self._path()
            digest = self.take().text[1:] if self.peek().kind == "digest" else ""
            return "get_attr", path, (), {}, digest
        op, target = ("call_module", self._path()) if token.text == "module" else ("call_function", token.text)
        args, kwargs = self._arguments()
        return op, target, args, kwargs, ""

    def _path(self) -> str:
        token = self.take()
        if token.kind not in ("word", "number") or not re.fullmatch(r"\w+(\.\w+)*", token.text, re.ASCII):
            raise self.error(f"found {token.text!r}; required the dotted name of an attribute")
        return token.text

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        self.expect("(")
        while not self.at(")"):
            if self.peek().kind == "word" and self.peek(1).text == "=":
                name = self.word("a keyword")
                self.next += 1
                kwargs[name] = self.argument()
            elif kwargs:
                raise self.error("a positional argument after one by keyword")
            else:
                args.append(self.argument())
            if not self.at(")"):
                self.expect(",")
        self.expect(")")
        return tuple(args), kwargs

    def argument(self) -> Any:
        """One argument; with colons behind or in front of it, a slice."""
        parts = [None if self.at(":") else self._primary()]
        while self.at(":") and len(parts) < 3:
            self.next += 1
            empty = self.peek().kind in ("end", "mark") and self.peek().text in (",", ")", "]", "}", ":", "end of line")
            parts.append(None if empty else self._primary())
        return parts[0] if len(parts) == 1 else slice(*parts)

    def _primary(self) -> Any:
        with self.nested():
            token = self.take()
            if token.kind == "node" and "." not in token.text:
                return Ref(token.text[1:])
            if token.kind == "string":
                return self.string(token)
            if token.kind == "number" or (token.text == "-" and self.peek().kind == "number"):
                return self.number(token)
            if token.kind == "word":
                return self.bare_word(token.text)
            if token.text == "...":
                return Ellipsis
            if token.text == "[":
                return self._members("]")
            if token.text == "(":
                return self._tuple()
            if token.text == "{":
                return self._dict()
            if token.text == "<":
                name = self.word("the name of a type")
                self.expect(">")
                return Word(f"<{name}>")
            raise self.error(f"found {token.text!r} at column {token.at + 1}; required an argument")

    def _members(self, end: str) -> list[Any]:
        members: list[Any] = []
        while not self.at(end):
            members.append(self.argument())
            if not self.at(end):
                self.expect(",")
        self.expect(end)
        return members

    def _tuple(self) -> Any:
        first = self.next
        members = tuple(self._members(")"))
        if len(members) == 1 and self.tokens[self.next - 2].text != ",":
            if isinstance(members[0], complex):
                return members[0]
            raise self.error(f"found parentheses around one argument at column {self.tokens[first].at + 1}")
        return members

    def _dict(self) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        while not self.at("}"):
            key = self._primary()
            if not isinstance(key, (str, int, float, bool)):
                raise self.error(f"found a key that is no literal: {key!r}")
            self.expect(":")
            made[key] = self.argument()
            if not self.at("}"):
                self.expect(",")
        self.expect("}")
        return made


def _comment(text: str) -> Comment:
    found: dict[str, str] = {}
    for part in text.split("  "):
        for prefix, key in (("layer ", "layer"), ("by ", "by"), ("changed by ", "changed_by"),
                            ("because ", "reason")):  # fmt: skip
            if part.startswith(prefix):
                found[key] = part.removeprefix(prefix)
                break
        else:
            found["source" if _SOURCE.match(part) else "module"] = part
    return Comment(**found)
