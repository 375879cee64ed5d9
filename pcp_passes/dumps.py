# SPDX-License-Identifier: Apache-2.0
"""Dumps on disk: plain folders that are safe to read from strangers.

::

    <folder>/<variant>/00-captured.txt        the graph as captured
                       01-place-rows.txt      ... and after each pass
                       constants.safetensors  contents of the small constants that the graphs name
                       manifest.json          context, and per graph: pass, rewrites, notes, invariants, digests

Nothing in a dump is code, and nothing is unpickled. Reading follows no link, leaves the folder by no name, and reads no
more than the limits below.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import fx

from pcp_passes.errors import ConfigError, DumpError
from pcp_passes.ir import meta
from pcp_passes.ir.opaque import UnreadConstant
from pcp_passes.ir.parsing.parser import Parsed, parse_graph
from pcp_passes.ir.printer import CONSTANT_BYTES, constant_digest, graph_fingerprint, print_graph, small_constant
from pcp_passes.ir.symbols import symbol_hints
from pcp_passes.passes.base import PassContext

FORMAT = 1
MANIFEST = "manifest.json"
CONSTANTS = "constants.safetensors"
VARIABLE = "PCP_DUMP"

_MAX_TEXT = 64 << 20
_MAX_MANIFEST = 16 << 20
_MAX_CONSTANTS = 256 << 20
_MAX_GRAPHS = 1000
_MAX_FOLDERS = 10_000
_MAX_DEPTH = 5
_PASS = re.compile(r"[a-z0-9][a-z0-9-]{0,99}\Z")
_UNPRINTABLE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def dump_folder(option: str | None) -> Path | None:
    """Where dumps go: the option when it is given, else ``$PCP_DUMP``, else nowhere."""
    found = option if option is not None else os.environ.get(VARIABLE, "")
    return Path(found) if found else None


def claim_folder(root: Path, name: str = "") -> Path:
    """A new folder ``<root>/[<name>/]graph-<n>`` for one captured graph, ``n`` the first that is free.

    Processes may claim at the same time: no two get one folder, and no earlier dump is overwritten.
    """
    base = root / re.sub(r"[^\w.-]+", "-", name).strip(".-")
    base.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        try:
            (base / f"graph-{number}").mkdir()
        except FileExistsError:
            number += 1
        else:
            return base / f"graph-{number}"


# -- writing


def context_json(ctx: PassContext) -> dict[str, Any]:
    """The fields of a context as plain JSON data."""
    found = {field.name: getattr(ctx, field.name) for field in fields(ctx)}
    return {name: sorted(held) if isinstance(held, frozenset) else held for name, held in found.items()}


def write_graph(folder: Path, file: str, graph: fx.Graph) -> dict[str, str]:
    """Write one graph; returns its entry's ``file``, ``fingerprint`` (of what runs) and ``sha256`` (of the file)."""
    text = print_graph(graph).encode()
    (folder / file).write_bytes(text)
    return {"file": file, "fingerprint": graph_fingerprint(graph), "sha256": hashlib.sha256(text).hexdigest()}


def small_constants(graph: fx.Graph) -> dict[str, torch.Tensor]:
    """Constants that the text shows by digest: ``"name#digest"`` to tensor."""
    found: dict[str, torch.Tensor] = {}
    for node in graph.nodes:
        held = small_constant(node)
        if held is not None and not isinstance(held, UnreadConstant):
            found[f"{node.target}#{constant_digest(held)}"] = held
    return found


def write_constants(folder: Path, constants: Mapping[str, torch.Tensor]) -> None:
    """Write ``constants.safetensors``.

    Raises:
        ConfigError: safetensors is not installed.
    """
    contents = {name: held.detach().cpu().contiguous().clone() for name, held in constants.items()}
    (folder / CONSTANTS).write_bytes(_safetensors().save(contents))


def size_hints(graph: fx.Graph) -> dict[str, int]:
    """Sizes at capture by symbol, such as ``{"sT": 4096}``: what a pass weighs bytes with."""
    return symbol_hints(size for node in graph.nodes for held in meta.tensors(node) for size in held.shape)


def write_manifest(
    folder: Path, ctx: PassContext, entries: list[dict[str, Any]], constants: Iterable[str], hints: Mapping[str, int]
) -> None:
    """Write ``manifest.json``, replacing an earlier one in one step."""
    contents = {
        "format": FORMAT, "torch": torch.__version__, "ctx": context_json(ctx), "hints": dict(hints),
        "constants": sorted(constants), "graphs": entries,
    }  # fmt: skip
    scratch = folder / f"{MANIFEST}.new"
    scratch.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
    scratch.replace(folder / MANIFEST)


def _safetensors() -> Any:
    try:
        import safetensors.torch as found
    except ImportError as error:
        raise ConfigError(
            f"the graph holds small constants, which a dump keeps in {CONSTANTS}; found no safetensors here. "
            "Install it: pip install safetensors"
        ) from error
    return found


# -- reading


@dataclass(frozen=True)
class Stage:
    """One graph of a dump, as the manifest lists it."""

    folder: Path
    file: str
    name: str
    """The pass that wrote it; ``captured`` for the first."""
    rewrites: int
    notes: tuple[str, ...]
    standing: frozenset[str]
    """Invariants that the pipeline says hold of it."""
    fingerprint: str
    sha256: str

    def text(self) -> str:
        """The printed graph. Raises :class:`DumpError` when the file is missing, too large, or no plain text."""
        return read_text(self.folder / self.file)


@dataclass(frozen=True)
class Dump:
    """A folder with a manifest that has been checked."""

    folder: Path
    ctx: PassContext
    version: str
    """Of the PyTorch that made it."""
    hints: dict[str, int]
    """Sizes at capture by symbol."""
    constants: tuple[str, ...]
    stages: tuple[Stage, ...]

    def stage(self, name: str) -> Stage | None:
        """The stage of a pass."""
        return next((stage for stage in self.stages if stage.name == name), None)

    def read(self, stage: Stage, *, strict: bool = True) -> Parsed:
        """The graph of a stage, with its constants."""
        constants = self.read_constants()
        return parse_graph(stage.text(), constants, strict=strict, where=stage.file, hints=self.hints)

    def read_constants(self) -> dict[str, torch.Tensor]:
        """Every constant that the manifest lists.

        Raises:
            DumpError: the file is missing or broken, or a tensor is not the one that its digest names.
            ConfigError: safetensors is not installed.
        """
        if not self.constants:
            return {}
        raw = read_bytes(self.folder / CONSTANTS, _MAX_CONSTANTS)
        safetensors = _safetensors()
        try:
            found: dict[str, torch.Tensor] = safetensors.load(raw)
        except Exception as error:  # its own error class is not exported in every version
            raise DumpError(f"{self.folder / CONSTANTS} is no safetensors file: {error}") from error
        for name in self.constants:
            if name not in found:
                raise DumpError(f"{CONSTANTS} holds no {name!r}, which {MANIFEST} lists; the dump is incomplete")
            held = found[name]
            if held.numel() * held.element_size() > CONSTANT_BYTES or constant_digest(held) != name.rpartition("#")[2]:
                raise DumpError(f"{CONSTANTS}: the contents of {name!r} are not those of its digest; do not trust it")
        return {name: found[name] for name in self.constants}


def find_dumps(path: Path) -> list[Path]:
    """Folders with a manifest: ``path`` itself, or those under it (five levels, links not followed).

    Raises:
        DumpError: there is none.
    """
    found = list(_folders(path, _MAX_DEPTH, [_MAX_FOLDERS])) if path.is_dir() else []
    if not found:
        raise DumpError(
            f"{path}: found no {MANIFEST} in it or under it; required a dump folder, as the option `dump`, {VARIABLE}, "
            "or `pcp run -o` writes it"
        )
    return found


def _folders(path: Path, depth: int, budget: list[int]) -> Iterator[Path]:
    if os.path.lexists(path / MANIFEST):
        yield path
        return
    for child in sorted(path.iterdir()) if depth else ():
        budget[0] -= 1
        if budget[0] < 0:
            raise DumpError(f"{path}: more than {_MAX_FOLDERS} files; name the dump folder itself")
        if child.is_dir() and not child.is_symlink():
            yield from _folders(child, depth - 1, budget)


def one_dump(path: Path) -> Dump:
    """The dump at ``path``. Raises :class:`DumpError` when there is none, several, or a broken one."""
    found = find_dumps(path)
    if len(found) > 1:
        listed = "\n  ".join(str(folder) for folder in found[:20])
        raise DumpError(f"{path} holds {len(found)} dumps; name one of them:\n  {listed}")
    return load_dump(found[0])


def load_dump(folder: Path) -> Dump:
    """Read and check a manifest; graphs are read when asked for.

    Raises:
        DumpError: the manifest is missing, too large, or not what this version writes; names the entry.
    """
    where = folder / MANIFEST
    try:
        held = json.loads(read_bytes(where, _MAX_MANIFEST).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DumpError(f"{where} is no JSON of ours: {type(error).__name__}: {error}") from error
    if not isinstance(held, dict) or held.get("format") != FORMAT:
        found = held.get("format") if isinstance(held, dict) else type(held).__name__
        raise DumpError(f"{where} has format {found!r}; this version reads {FORMAT}. Dump the graph again.")
    graphs, constants, hints = held.get("graphs"), held.get("constants"), held.get("hints")
    if not isinstance(graphs, list) or not 0 < len(graphs) <= _MAX_GRAPHS:
        raise DumpError(f"{where}: 'graphs' must list 1 to {_MAX_GRAPHS} graphs")
    if not isinstance(constants, list) or not all(isinstance(name, str) and "#" in name for name in constants):
        raise DumpError(f"{where}: 'constants' must list names such as 'offset#0123456789ab'")
    if not isinstance(hints, dict) or not all(type(n) is int and 2 <= n < 1 << 31 for n in hints.values()):
        raise DumpError(f"{where}: 'hints' must map symbols to sizes from 2")
    stages = tuple(_stage(folder, where, index, entry) for index, entry in enumerate(graphs))
    return Dump(folder, _context(where, held.get("ctx")), str(held.get("torch")), hints, tuple(constants), stages)


def _context(where: Path, held: object) -> PassContext:
    known = {field.name: field for field in fields(PassContext)}
    if not isinstance(held, dict) or set(held) - set(known) or not isinstance(held.get("pcp"), int):
        raise DumpError(f"{where}: 'ctx' is {held!r}; required a mapping of {', '.join(known)}")
    try:
        values: dict[str, Any] = {key: frozenset(v) if isinstance(v, list) else v for key, v in held.items()}
        return PassContext(**values)
    except (ConfigError, TypeError) as error:
        raise DumpError(f"{where}: 'ctx' is no context: {error}") from error


_ENTRY: dict[str, type] = {
    "file": str, "pass": str, "rewrites": int, "notes": list, "standing": list, "fingerprint": str, "sha256": str,
}  # fmt: skip


def _stage(folder: Path, where: Path, index: int, entry: object) -> Stage:
    if not isinstance(entry, dict):
        raise DumpError(f"{where}: graph {index} is {type(entry).__name__}; required a mapping")
    for key, kind in _ENTRY.items():
        if not isinstance(entry.get(key), kind):
            raise DumpError(f"{where}: graph {index} has {key!r} {entry.get(key)!r}; required a {kind.__name__}")
    if not all(isinstance(text, str) for text in (*entry["notes"], *entry["standing"])):
        raise DumpError(f"{where}: notes and standing of graph {index} must be lists of strings")
    wanted = f"{index:02d}-{entry['pass']}.txt"
    if not _PASS.match(entry["pass"]) or entry["file"] != wanted:
        raise DumpError(f"{where}: graph {index} is in the file {entry['file']!r}; required {wanted!r}, in this folder")
    return Stage(
        folder, entry["file"], entry["pass"], entry["rewrites"], tuple(entry["notes"]), frozenset(entry["standing"]),
        entry["fingerprint"], entry["sha256"],
    )  # fmt: skip


def read_text(path: Path) -> str:
    """A printed graph as text, checked to hold nothing that a terminal would obey."""
    try:
        text = read_bytes(path, _MAX_TEXT).decode("utf-8")
    except UnicodeDecodeError as error:
        raise DumpError(f"{path} is no text: {error}") from error
    found = _UNPRINTABLE.search(text)
    if found:
        line = text.count("\n", 0, found.start()) + 1
        raise DumpError(f"{path}, line {line}: holds the character {found.group()!r}, which the printer never writes")
    return text


def read_bytes(path: Path, limit: int) -> bytes:
    """A regular file of at most ``limit`` bytes; a link, a device or a larger file is refused."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        reason = "is a link, which is not followed" if path.is_symlink() else error.strerror or str(error)
        raise DumpError(f"{path}: {reason}") from error
    with os.fdopen(handle, "rb") as file:
        held = os.fstat(file.fileno())
        if not stat.S_ISREG(held.st_mode) or path.is_symlink():
            raise DumpError(f"{path} is no regular file")
        if held.st_size > limit:
            raise DumpError(f"{path} has {held.st_size:,} bytes; at most {limit:,} are read")
        return file.read(limit)
