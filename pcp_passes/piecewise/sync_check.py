# SPDX-License-Identifier: Apache-2.0
"""A mode in which reading the device from the host fails: a step under it can be queued without ever waiting.

On a GPU such a read waits for all queued work, and no graph can hold it. A CPU has nothing to wait for, so there the
mode looks at *what is asked for*: a value as a Python number, a list or an array; ``.cpu()``; a shape that depends on
data (``nonzero``, a boolean index, ``unique``). It takes every tensor for one of the device, whichever it is::

    with SyncCheck():
        outputs = program.run(memory, inputs)

References on the CPU that stand for a kernel say so themselves, see :mod:`pcp_passes.host_reads`. What a compiled
artifact does inside itself is not seen; its graph is checked by :mod:`pcp_passes.piecewise.capturable`.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pcp_passes.capture_mode import is_capturable_only
from pcp_passes.errors import HostSync
from pcp_passes.host_reads import Exempt

ENVIRONMENT = "PCP_SYNC_CHECK"
"""With the value 1, :meth:`pcp_passes.engine.executor.Executor.execute` runs every step under a check."""

OWN_OPS = frozenset({"pcp", "pcp_kernels"})
"""Namespaces whose ops have Python bodies: the check looks inside."""

_TO_HOST = {
    torch.Tensor.cpu: "copies a tensor to the host",
    torch.Tensor.numpy: "reads a tensor on the host",
    torch.Tensor.__array__: "reads a tensor on the host",
    torch.Tensor.tolist: "reads a tensor on the host",
    torch.Tensor.item: "reads a value on the host",
    torch.Tensor.__bool__: "reads a value on the host, to decide by it",
    torch.Tensor.__int__: "reads a value on the host",
    torch.Tensor.__float__: "reads a value on the host",
    torch.Tensor.__complex__: "reads a value on the host",
    torch.Tensor.__index__: "reads a value on the host, as an index or a size",
}
"""Not seen by a dispatch mode on a CPU, or only under another name."""

_MAKERS = (torch.tensor, torch.as_tensor)
_ALSO_READ = frozenset({"aten::_linalg_check_errors", "aten::histc", "aten::embedding_renorm_"})
"""Ops that read the host on a GPU, and have no tag that says so."""

_STANDS_FOR_KERNEL = re.compile(r"\bpcp_kernels[\\/](reference[\\/](?!paged\.py)|ops[\\/]launch\.py)")
"""References that read the host where their kernels do not, and checks of arguments that are made on a CPU only. That
package knows nothing of this one. ``reference/paged.py`` reads nothing: it is what a graph holds on a CPU."""

_TORCH = os.path.dirname(torch.__file__) + os.sep
_SKIPPED = (
    _TORCH, __file__, os.path.join(os.path.dirname(__file__), "reads.py"), contextlib.__file__, functools.__file__
)  # fmt: skip


class SyncCheck(AbstractContextManager["SyncCheck"]):
    """Inside, whatever makes the host wait for the device raises :class:`~pcp_passes.errors.HostSync`.

    The error names the op and the source line: the innermost frame outside torch. Where CUDA is in use, PyTorch's own
    check (``torch.cuda.set_sync_debug_mode``) runs too. Reentrant; for one thread.

    Args:
        found: count reads here instead of failing, by ``"<file>: <op>"``; the file of a captured graph is ``graph``.
    """

    def __init__(self, found: Counter[str] | None = None) -> None:
        self._stack = ExitStack()
        self._found = found

    def __enter__(self) -> SyncCheck:
        if torch.cuda.is_initialized() and self._found is None:
            before = torch.cuda.get_sync_debug_mode()
            self._stack.callback(torch.cuda.set_sync_debug_mode, before)
            torch.cuda.set_sync_debug_mode("error")
        self._stack.enter_context(_Dispatch(self._found))
        self._stack.enter_context(_Functions(self._found))
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.close()


def if_wanted() -> AbstractContextManager[Any]:
    """A :class:`SyncCheck` where the environment has ``PCP_SYNC_CHECK=1``, nothing otherwise."""
    return SyncCheck() if os.environ.get(ENVIRONMENT) == "1" else nullcontext()


class _Functions(TorchFunctionMode):
    """Sees the calls that never reach the dispatcher on a CPU: ``tolist``, ``numpy``, ``.cpu()``."""

    def __init__(self, found: Counter[str] | None) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        why = _why_function(func, args, kwargs or {})
        if why is not None and not _exempt(args):
            _fail_or_count(f"{'torch' if func in _MAKERS else 'Tensor'}.{func.__name__}", why, self.found)
        return func(*args, **(kwargs or {}))


class _Dispatch(TorchDispatchMode):
    """Sees every op, also those inside the Python bodies of this package's ops."""

    def __init__(self, found: Counter[str] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        why = why_synced(func, args, given)
        if why is not None and not _exempt((args, given)):
            _fail_or_count(func.name(), why, self.found)
        below = own_body(func, (args, given))
        if below is None:
            return func(*args, **given)
        # Both modes are off inside a handler. Dispatching below the one of modes lets them see the op's own calls.
        with self, _Functions(self.found):
            return func.redispatch(below, *args, **given)


class _Below(dict[str, Any]):
    def __missing__(self, device: str) -> Any:
        key = torch._C._dispatch_key_for_device(device)
        found = self[device] = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        return found


_BELOW = _Below()


def own_body(func: Any, held: Any) -> Any:
    """The keys to redispatch ``func`` to, so that a dispatch mode sees the ops of its Python body; None without one."""
    on = next(tensors_in(held), None)
    if func.namespace not in OWN_OPS or on is None or type(on) not in (torch.Tensor, torch.nn.Parameter):
        return None
    return _BELOW[on.device.type]


def source_of() -> tuple[str, int]:
    """File and line of the innermost caller outside PyTorch and this check."""
    return next(((file, line) for file, line, _ in _frames() if not file.startswith("<")), ("?", 0))


def why_synced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why an op makes the host wait, were its tensors on a GPU; ``None`` where it does not.

    Args:
        func: an ``OpOverload``.
        args, kwargs: its arguments.
    """
    name, tags = func.name().partition(".")[0], func.tags
    if name in ("aten::index", "aten::_unsafe_index"):
        return _MASKED if _has_mask(args[1]) else None
    if name in ("aten::index_put", "aten::index_put_", "aten::_index_put_impl_"):
        # A single value goes through masked_fill, which counts nothing.
        return _MASKED if _has_mask(args[1]) and args[2].numel() != 1 else None
    if name == "aten::repeat_interleave":
        sized = kwargs.get("output_size", args[1] if len(args) > 1 else None) is not None
        return None if sized else "takes the size of its result from data: give output_size"
    if torch.Tag.data_dependent_output in tags or name in _ALSO_READ:
        return "reads a value on the host"
    if torch.Tag.dynamic_output_shape in tags:
        return "takes the size of its result from data"
    return _why_copied(name, args, kwargs)


_MASKED = "takes the size of its result from data: a boolean index counts what is true"


def _has_mask(indices: Any) -> bool:
    return any(isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _why_copied(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """A copy between host and device that waits for its end, or for staging memory."""
    if name == "aten::_to_copy":
        source, target = args[0], torch.device(kwargs.get("device") or args[0].device)
        background, pinned = bool(kwargs.get("non_blocking")), True
    elif name == "aten::copy_":
        source, target = args[1], args[0].device
        background = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        pinned = target.type != "cpu" or _is_pinned(args[0])
    else:
        return None
    if source.device.type == target.type:
        return None
    if target.type == "cpu":
        return None if background and pinned else "copies a tensor to the host, and waits for it"
    if source.device.type == "cpu" and not (background and _is_pinned(source)):
        return "copies to the device from memory that is not pinned, or without non_blocking=True"
    return None


def _is_pinned(tensor: torch.Tensor) -> bool:
    return torch.cuda.is_available() and tensor.is_pinned()


def _why_function(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    if func in _TO_HOST:
        return _TO_HOST[func]
    if func is torch.Tensor.to and "cpu" in (kwargs.get("device"), *args[1:2]):  # a name; the engine's device is none
        return "copies a tensor to the host"
    if func in _MAKERS and not isinstance(args[0], torch.Tensor) and next(tensors_in(args[0]), None) is not None:
        return "reads the tensors that it is given on the host"
    return None


def tensors_in(held: Any) -> Iterator[torch.Tensor]:
    """Tensors among arguments or results of an op."""
    if isinstance(held, torch.Tensor):
        yield held
    elif isinstance(held, (tuple, list)):
        for part in held:
            yield from tensors_in(part)
    elif isinstance(held, dict):
        yield from tensors_in(tuple(held.values()))


def _exempt(held: Any) -> bool:
    if any(tensor.device.type != "cpu" for tensor in tensors_in(held)):
        return False
    if Exempt.depth > 0 and not is_capturable_only():
        return True
    inner = next((file for file, *_ in _frames() if not file.startswith("<")), "")
    return _STANDS_FOR_KERNEL.search(inner) is not None


def _frames() -> Iterator[tuple[str, int, Any]]:
    """File, line and frame of the callers, innermost first, without PyTorch's and Python's own."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_SKIPPED):
            yield file, frame.f_lineno, frame
        frame = frame.f_back


def _fail_or_count(op: str, why: str, found: Counter[str] | None) -> None:
    if found is None:
        raise _fault(op, why)
    file = next((file for file, *_ in _frames()), "?")
    found[f"{'graph' if file.startswith('<eval_with_key>') else file}: {op}"] += 1


def _fault(op: str, why: str) -> HostSync:
    lines = [f"{op} {why}: no step may wait for the device, and no CUDA graph can hold it."]
    for file, line, frame in _frames():
        if file.startswith("<eval_with_key>"):
            lines.append(f"  graph   {linecache.getline(file, line, frame.f_globals).strip()}")
        elif not file.startswith("<"):
            lines.append(f"  source  {os.path.basename(file)}:{line} in {frame.f_code.co_name}")
            lines.append(f"          {linecache.getline(file, line).strip()[:100]}")
            break
    lines.append(
        "  next    compute it on the device with fixed shapes; a CPU reference that stands for a kernel says so with "
        "pcp_passes.host_reads.allowed"
    )
    return HostSync("\n".join(lines))
