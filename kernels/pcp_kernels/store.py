# SPDX-License-Identifier: Apache-2.0
"""Generated kernels on disk, and their import.

Triton reads a kernel's source from a file, so every text gets one: ``<root>/<digest>/kernel.py``, beside a
``spec.json`` that says what it is. The digest covers spec, generator, Triton and mode, so a folder has one right
content; a file that holds anything else was damaged and is written anew. Files are put in place by one rename, so
processes that write the same folder at once cannot see half of one.

``PCP_KERNELS_CACHE`` names the root (``~`` is the user's home); otherwise it is ``pcp_kernels`` in the user's cache
folder.
"""

from __future__ import annotations

import atexit
import functools
import importlib.metadata
import json
import linecache
import logging
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from pcp_kernels.generate import generate, generator_version
from pcp_kernels.specs import KernelSpec

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "PCP_KERNELS_CACHE"


class KernelStoreError(RuntimeError):
    """No folder can hold the generated kernels, or this process cannot run the text that was asked for."""


def root() -> Path:
    """Where generated kernels are kept."""
    named = os.environ.get(CACHE_VARIABLE)
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pcp_kernels"


def require_root() -> Path:
    """:func:`root`, for who is about to name it to a user.

    Raises:
        KernelStoreError: it, or what should hold it, is there and no folder.
    """
    at = root()
    found = next(path for path in (at, *at.parents) if os.path.lexists(path))
    if not found.is_dir():
        raise KernelStoreError(
            f"generated kernels cannot be kept in {at}: {found} is no folder. Set {CACHE_VARIABLE} to one that this "
            f"process can write."
        )
    return at


def triton_version() -> str:
    """Version of the installed Triton, which is not imported; ``"none"`` without it."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def folder(spec: KernelSpec, *, interpret: bool = False) -> Path:
    """Where the files of ``spec`` are, or would be, under :func:`root`."""
    return root() / spec.digest(triton_version(), generator_version(), interpret=interpret)


def write(spec: KernelSpec, *, interpret: bool = False) -> Path:
    """Make sure that the files of ``spec`` exist and are whole; the path of ``kernel.py``.

    A cache that cannot be written is replaced, with a warning, by a folder that this process alone uses.

    Raises:
        KernelStoreError: no temporary folder can be written either.
    """
    return _write(spec, generate(spec, interpret), interpret)


def load(spec: KernelSpec, *, interpret: bool = False) -> ModuleType:
    """The module of ``spec``: ``kernel`` (``triton.jit``) and ``META``; the same object at every call.

    Raises:
        ModuleNotFoundError: without triton.
        KernelStoreError: ``interpret`` does not say how Triton runs in this process, or nothing can be written.
    """
    _require_mode(interpret)
    return _load(spec, interpret)


@functools.cache
def _load(spec: KernelSpec, interpret: bool) -> ModuleType:
    text = generate(spec, interpret)
    path = _write(spec, text, interpret)
    module = ModuleType(f"pcp_kernels_generated.{path.parent.name}")
    module.__file__ = os.fspath(path)
    # Triton takes a function's source from its file through linecache; the text in memory is the one that was checked.
    linecache.cache[os.fspath(path)] = (len(text), None, text.splitlines(keepends=True), os.fspath(path))
    sys.modules[module.__name__] = module
    exec(compile(text, os.fspath(path), "exec"), module.__dict__)
    return module


def launch_options(module: ModuleType) -> dict[str, Any]:
    """Keyword arguments of a launch, ``module.kernel[grid](*arguments, **launch_options(module))``."""
    return {key: module.META[key] for key in ("num_warps", "num_stages", "enable_fp_fusion")}


def _require_mode(interpret: bool) -> None:
    import triton

    interpreted = bool(triton.knobs.runtime.interpret)
    if interpreted != interpret:
        raise KernelStoreError(
            f"found TRITON_INTERPRET={'1' if interpreted else '0'} in a process that asks for interpret={interpret}; "
            f"required: equal, because a text for one computes nonsense in the other. Set TRITON_INTERPRET before "
            f"triton is imported."
        )


def _write(spec: KernelSpec, text: str, interpret: bool) -> Path:
    label = {
        "spec": spec.to_json(),
        "name": spec.name,
        "interpret": interpret,
        "triton": triton_version(),
        "generator": generator_version(),
    }
    files = {"kernel.py": text, "spec.json": json.dumps(label, indent=2, sort_keys=True) + "\n"}
    home = folder(spec, interpret=interpret)
    try:
        for name, content in files.items():
            _ensure(home / name, content)
    except OSError as error:
        home = _private() / home.name
        _warn_once(root(), home.parent, str(error))
        try:
            for name, content in files.items():
                _ensure(home / name, content)
        except OSError as second:
            raise KernelStoreError(
                f"generated kernels cannot be written: neither to {root()} ({error}) nor to {home} ({second}). "
                f"Set {CACHE_VARIABLE} to a folder that this process can write."
            ) from second
    return home / "kernel.py"


_warned: set[Path] = set()


def _warn_once(at: Path, instead: Path, why: str) -> None:
    """One process needs some ten kernels, which all fail alike."""
    if at not in _warned:
        _warned.add(at)
        logger.warning(
            "the kernel cache %s cannot be used (%s); this process writes to %s. Set %s to a folder that it can write.",
            at, why, instead, CACHE_VARIABLE,
        )  # fmt: skip


def _ensure(path: Path, content: str) -> None:
    """Let ``path`` hold ``content``; an existing file that does is left alone, so a read-only cache will do."""
    wanted = content.encode()
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
    else:
        if found == wanted:
            return
        logger.warning("%s is damaged (%d bytes found, %d required): generated anew", path, len(found), len(wanted))
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(wanted)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that their owner alone can read; a cache may be shared.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@functools.cache
def _private() -> Path:
    try:
        held = tempfile.TemporaryDirectory(prefix="pcp_kernels_")
    except OSError as error:
        raise KernelStoreError(
            f"generated kernels cannot be written: neither to {root()} nor to a temporary folder ({error}). "
            f"Set {CACHE_VARIABLE} to a folder that this process can write."
        ) from error
    atexit.register(held.cleanup)
    return Path(held.name)
