# SPDX-License-Identifier: Apache-2.0
"""Bytes to train a tiny model on, and bytes it never saw: the language reference and sources that come with Python.

Everything is read from the running interpreter (PSF licence). Releases of Python differ by a few paragraphs, so the
streams do as well; :attr:`Text.digest` says which ones a run had. The split is by document, after every paragraph that
occurs twice has been dropped: the reference quotes itself at length, and a quoted paragraph on both sides would make
the held-out half a memory test.
"""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch

from pcp_passes.errors import ConfigError

BEGIN, END, FILLER = 256, 257, 258
VOCABULARY = 264
"""256 byte values and three marks, rounded up to a multiple of eight."""

# Long, commented modules: prose and code alternate. A module frozen into the interpreter has no file and is left out.
LEARNT = """
argparse ast asyncio.base_events asyncio.streams asyncio.tasks calendar cmd collections concurrent.futures._base
configparser contextlib copy csv dataclasses datetime difflib dis doctest email.message enum fnmatch functools glob gzip
heapq html.parser http.client inspect ipaddress json.decoder json.encoder logging logging.handlers optparse pathlib pdb
pickle pprint queue random selectors shutil smtplib socket socketserver statistics string subprocess tempfile threading
tokenize traceback typing unittest.case unittest.mock urllib.parse urllib.request warnings weakref zipfile
""".split()
KEPT_BACK = "bisect graphlib shelve shlex textwrap timeit unittest.runner wave".split()
KEEP_BACK_EVERY = 16
"""One reference topic in so many is held out."""


@dataclass(frozen=True)
class Text:
    """Two streams of documents, each ``BEGIN bytes END``.

    Attributes:
        train: i64[n], what a model may learn from.
        held_out: i64[m], what it is judged on.
        digest: SHA-256 over both.
    """

    train: torch.Tensor
    held_out: torch.Tensor
    digest: str


def python_text() -> Text:
    """The text of this interpreter, split.

    Raises:
        ConfigError: this installation of Python leaves its reference (``pydoc_data``) out.
    """
    train: list[int] = []
    held_out: list[int] = []
    for number, document in enumerate(_reference()):
        _append(train if number % KEEP_BACK_EVERY else held_out, document)
    for stream, names in ((train, LEARNT), (held_out, KEPT_BACK)):
        for name in names:
            source = _source(name)
            if source:
                _append(stream, source)
    halves = torch.tensor(train), torch.tensor(held_out)
    digest = hashlib.sha256(b"".join(half.numpy().tobytes() for half in halves)).hexdigest()
    return Text(*halves, digest)


def held_out_prompts(count: int, length: int) -> torch.Tensor:
    """i64[count, length]: windows at even distances of the held-out stream, the same ones in every run."""
    return spread(python_text().held_out, count, length)


def spread(stream: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """i64[count, length]: windows of a stream i64[n], n > length, their starts at even distances."""
    starts = torch.linspace(0, stream.numel() - length - 1, count).long()
    return stream[starts[:, None] + torch.arange(length)]


def readable(tokens: list[int]) -> str:
    """The bytes of a token row as text; marks are dropped, a cut character becomes U+FFFD."""
    return bytes(token for token in tokens if token < BEGIN).decode(errors="replace")


def _append(stream: list[int], document: str) -> None:
    stream += [BEGIN, *document.encode(), END]


def _reference() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError(
            "the tiny model's text is pydoc_data, a part of Python that this installation leaves out. "
            "Next: install the full standard library of Python"
        ) from error
    seen: set[str] = set()
    documents = []
    for _, topic in sorted(topics.items()):
        fresh = []
        for paragraph in topic.split("\n\n"):
            key = " ".join(paragraph.split())
            if key and key not in seen:
                fresh.append(paragraph)
        # Marked after the whole topic: what a topic repeats within itself stays as it is.
        seen.update(" ".join(paragraph.split()) for paragraph in fresh)
        if fresh:
            documents.append("\n\n".join(fresh))
    return documents


def _source(name: str) -> str:
    """The text of a module of the standard library, empty where this Python has no file of it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    return Path(spec.origin).read_text(encoding="utf-8")
