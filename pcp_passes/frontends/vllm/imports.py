# SPDX-License-Identifier: Apache-2.0
"""Act on a module when it is imported, without importing it."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Around = Callable[[], contextlib.AbstractContextManager[None]]
After = Callable[[ModuleType], None]


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the execution of registered modules. Finds nothing itself."""

    def __init__(self) -> None:
        self.around: dict[str, Around] = {}
        self.after: dict[str, list[After]] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in self.around and name not in self.after:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with self.around.get(name, contextlib.nullcontext)():
                execute(module)
            for act in self.after.get(name, ()):
                act(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _Finder()


def _install() -> None:
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def around_import(name: str, context: Around) -> None:
    """Execute module ``name`` inside ``context()``. It must not be imported yet."""
    _install()
    _finder.around[name] = context


def after_import(name: str, act: After) -> None:
    """Call ``act(module)`` when module ``name`` has been imported; at once if it is already there."""
    module = sys.modules.get(name)
    if module is not None:
        act(module)
        return
    _install()
    _finder.after.setdefault(name, []).append(act)
