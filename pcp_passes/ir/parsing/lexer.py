# SPDX-License-Identifier: Apache-2.0
"""Tokens and size expressions of printed graphs, read without PyTorch and without looking anything up.

Text may come from a stranger: lines, nesting and numbers are bounded, and every character is accounted for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from pcp_passes.errors import DumpError

MAX_LINE = 1 << 18
MAX_DEPTH = 40
MAX_EXPRESSION = 1000
_MAX_DIGITS = 20
_LEVELS = (("|",), ("&",), ("<", ">", "<=", ">=", "==", "!="), ("+", "-"), ("*", "/", "//", "%"))
_EXPRESSION_COST = len(_LEVELS) + 1

_TOKEN = re.compile(
    r"""(?P<comment>\ \ \ \#\ .*)
      | (?P<space>\ +)
      | (?P<digest>\#[0-9a-f]{12}\b)
      | (?P<node>%\w+(?:\.\w+)?)
      | (?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
      | (?P<number>(?:\d+\.\d*|\d+)(?:e[+-]?\d+)?j?|(?:inf|nan)j?\b)
      | (?P<word>[A-Za-z_]\w*(?:\.\w+)*(?:\.\*)?)
      | (?P<mark>\.\.\.|//|\*\*|<=|>=|==|!=|[-+*/%<>&|~()\[\]{},:=])""",
    re.VERBOSE | re.ASCII,
)


@dataclass(frozen=True)
class Size:
    """An expression over symbols (``4*s72``, ``Min(16, s0)``): nested ``(operator, operands...)`` tuples."""

    tree: tuple[Any, ...]
    text: str


class Token(NamedTuple):
    """A piece of a line; ``at`` is its column, from 0."""

    kind: str
    text: str
    at: int


class TokenReader:
    """One line as tokens, and the parts that types and arguments share. Errors name place, line and column."""

    def __init__(self, line: str, row: int, where: str) -> None:
        self.line, self.row, self.where = line, row, where
        self.tokens: list[Token] = []
        self.next = 0
        self.depth = 0
        if len(line) > MAX_LINE:
            raise self.error(f"{len(line)} characters; at most {MAX_LINE} are read")
        self._tokenize()

    def error(self, found: str) -> DumpError:
        shown = self.line if len(self.line) <= 200 else self.line[:200] + "..."
        return DumpError(f"{self.where}, line {self.row}: {found}\n  {shown!r}")

    def _tokenize(self) -> None:
        at = 0
        while at < len(self.line):
            match = _TOKEN.match(self.line, at)
            if match is None:
                raise self.error(f"found {self.line[at]!r} at column {at + 1}, which starts nothing of a printed graph")
            if match.lastgroup != "space":
                self.tokens.append(Token(str(match.lastgroup), match.group(), at))
            at = match.end()

    def peek(self, ahead: int = 0) -> Token:
        index = self.next + ahead
        return self.tokens[index] if index < len(self.tokens) else Token("end", "end of line", len(self.line))

    def take(self) -> Token:
        token = self.peek()
        self.next += 1
        return token

    def at(self, mark: str) -> bool:
        return self.peek().kind == "mark" and self.peek().text == mark

    def calls(self, word: Token, ahead: int = 0) -> bool:
        """Whether the token ``ahead`` opens the arguments of ``word``: a parenthesis with no space between."""
        following = self.peek(ahead)
        return following.text == "(" and following.at == word.at + len(word.text)

    def expect(self, mark: str) -> None:
        if not self.at(mark):
            raise self.error(f"found {self.peek().text!r} at column {self.peek().at + 1}; required {mark!r}")
        self.next += 1

    def word(self, what: str) -> str:
        token = self.take()
        if token.kind != "word":
            raise self.error(f"found {token.text!r}; required {what}")
        return token.text

    @contextmanager
    def nested(self, cost: int = _EXPRESSION_COST) -> Iterator[None]:
        """Count one level of nesting, so that a hostile line cannot exhaust the stack."""
        self.depth += cost
        if self.depth > MAX_DEPTH * _EXPRESSION_COST:
            raise self.error(f"nested more than {MAX_DEPTH} deep")
        yield
        self.depth -= cost

    def string(self, token: Token) -> str:
        try:
            return str(ast.literal_eval(token.text))
        except (SyntaxError, ValueError):
            raise self.error(f"{token.text!r} is no string literal") from None

    def number(self, token: Token) -> int | float | complex:
        """A literal that begins at ``token``: ``-1``, ``1e-06``, ``inf``, ``1+2j``."""
        text = self._digits(token)
        if self.peek().text in ("+", "-") and self.peek(1).kind == "number" and self.peek(1).text.endswith("j"):
            text += self.take().text + self.take().text
        return self._literal(text)

    def _digits(self, token: Token) -> str:
        return token.text + (self.take().text if token.text == "-" else "")

    def _literal(self, text: str) -> int | float | complex:
        if text.endswith("j"):
            return complex(text)
        if not re.fullmatch(r"-?\d+", text):
            return float(text)
        if len(text) > _MAX_DIGITS:
            raise self.error(f"a number of {len(text)} digits; at most {_MAX_DIGITS} are read")
        return int(text)

    def sizes(self, end: str) -> tuple[Size, ...]:
        sizes: list[Size] = []
        while not self.at(end):
            sizes.append(self.expression())
            if not self.at(end):
                self.expect(",")
        self.expect(end)
        return tuple(sizes)

    def expression(self) -> Size:
        begin = self.peek().at
        tree = self._binary(0)
        text = self.line[begin : self.peek().at].rstrip()
        if len(text) > MAX_EXPRESSION:
            raise self.error(f"a size of {len(text)} characters; at most {MAX_EXPRESSION} are read")
        return Size(tree, text)

    def _binary(self, level: int) -> tuple[Any, ...]:
        if level == len(_LEVELS):
            return self._unary()
        with self.nested(1):
            left = self._binary(level + 1)
            while self.peek().kind == "mark" and self.peek().text in _LEVELS[level]:
                left = (self.take().text, left, self._binary(level + 1))
            return left

    def _unary(self) -> tuple[Any, ...]:
        with self.nested(1):
            if self.peek().text in ("-", "~"):
                return (f"unary {self.take().text}", self._unary())
            left = self._atom()
            return (self.take().text, left, self._unary()) if self.at("**") else left

    def _atom(self) -> tuple[Any, ...]:
        token = self.take()
        if token.kind == "number":
            return ("literal", self._literal(token.text))
        if token.text == "(":
            inner = self._binary(0)
            self.expect(")")
            return inner
        if token.kind != "word":
            raise self.error(f"found {token.text!r} at column {token.at + 1}; required a size")
        if self.calls(token):
            self.next += 1
            arguments: list[Any] = []
            while not self.at(")"):
                arguments.append(self._binary(0))
                if not self.at(")"):
                    self.expect(",")
            self.expect(")")
            return ("call", token.text, *arguments)
        return ("name", token.text)
