# SPDX-License-Identifier: Apache-2.0
"""The grammar of what a printed node says of its value: type, strides, device, placement.

::

    kind = type ["strides(" sizes ")"] ["on" device] [placement ["rows" placement]]
    type = dtype "[" sizes "]" | "sym" expression | "layer" string | literal | "(" [type] {"," [type]} ")"
    placement = word ["(" values ")"] | "(" placement {"," placement} ")"
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pcp_passes.ir.parsing.lexer import Size, TokenReader


@dataclass(frozen=True)
class Word:
    """A bare word whose meaning the parser looks up: a dtype, a device, ``torch.strided``."""

    text: str


@dataclass(frozen=True)
class Named:
    """``layer 'model.layers.0'`` as an argument or a type."""

    layer: str


@dataclass(frozen=True)
class TensorType:
    """``f32[4*s72, 128]``."""

    dtype: str
    sizes: tuple[Size, ...]


@dataclass(frozen=True)
class Absent:
    """An empty place in a tuple of types: no value."""


@dataclass(frozen=True)
class Placed:
    """``shard(1, 2, 1)``: the word, and its numbers and names."""

    word: str
    values: tuple[int | str, ...] = ()


_UNIQUE_PLACEMENTS = frozenset({"rank_major", "replicate", "partial"})


@dataclass(frozen=True)
class Kind:
    """What a statement says of its value."""

    text: str = ""
    """The type as written."""
    type: Any = Absent()
    strides: tuple[Size, ...] | None = None
    device: str = "cpu"
    placement: tuple[Placed, ...] = ()
    """One; several for an op with several results."""
    several: bool = False
    rows: Placed | None = None
    placement_text: str = ""


class TypeReader(TokenReader):
    """Reads kinds."""

    def kind(self) -> Kind:
        first = self.peek().at
        made = Absent() if self._starts_placement() else self._type()
        text = self.line[first : self.peek().at].rstrip() if not isinstance(made, Absent) else ""
        strides, device, rows = None, "cpu", None
        if self.peek().text == "strides":
            self.next += 1
            self.expect("(")
            strides = self.sizes(")")
        if self.peek().text == "on":
            self.next += 1
            device = self.word("a device")
        begin = self.peek().at
        several = self.at("(")
        placed = self._placements() if several else (self._placed(),) if self.peek().kind == "word" else ()
        if placed and self.peek().text == "rows":
            self.next += 1
            rows = self._placed()
        where = self.line[begin : self.peek().at].rstrip()
        return Kind(text, made, strides, device, placed, several, rows, where)

    def _placements(self) -> tuple[Placed, ...]:
        self.expect("(")
        found = [self._placed()]
        while not self.at(")"):
            self.expect(",")
            found.append(self._placed())
        self.expect(")")
        return tuple(found)

    def _placed(self) -> Placed:
        word = self.word("a placement")
        values: list[int | str] = []
        if self.at("("):
            self.next += 1
            while not self.at(")"):
                token = self.take()
                if token.kind not in ("number", "word"):
                    raise self.error(f"found {token.text!r}; required a number or a name in a placement")
                values.append(int(token.text) if token.text.isdigit() and len(token.text) < 10 else token.text)
                if not self.at(")"):
                    self.expect(",")
            self.expect(")")
        return Placed(word, tuple(values))

    def _starts_placement(self) -> bool:
        """Whether a placement stands where a type could: of a node that returns nothing."""
        return self.peek().text in _UNIQUE_PLACEMENTS or (self.peek().kind == "word" and self.calls(self.peek(), 1))

    def _type(self) -> Any:
        with self.nested():
            if self.at("("):
                return self._type_tuple()
            token = self.take()
            if token.kind == "string":
                return self.string(token)
            if token.kind == "number" or token.text == "-":
                return self.number(token)
            if token.kind != "word":
                raise self.error(f"found {token.text!r} at column {token.at + 1}; required a type")
            if self.at("["):
                self.next += 1
                return TensorType(token.text, self.sizes("]"))
            return self.bare_word(token.text)

    def _type_tuple(self) -> tuple[Any, ...]:
        self.expect("(")
        members: list[Any] = []
        while True:
            members.append(Absent() if self.at(",") or self.at(")") else self._type())
            if not self.at(","):
                break
            self.next += 1
        self.expect(")")
        return () if members == [Absent()] else tuple(members)

    def bare_word(self, text: str) -> Any:
        if text in ("None", "True", "False"):
            return {"None": None, "True": True, "False": False}[text]
        if text == "layer" and self.peek().kind == "string":
            return Named(self.string(self.take()))
        if text == "sym":
            return self.expression()
        return Word(text)
