# SPDX-License-Identifier: Apache-2.0
"""Call operators of ``pcp_kernels.ops`` in the interpreting child, on the generated text or on a spoilt one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def call(name: str, args: Sequence[Any], options: Mapping[str, Any] | None = None) -> Any:
    """``pcp_kernels.ops.<name>(*args, **options)``; an operator that changes its first argument returns that."""
    from pcp_kernels import ops

    result = getattr(ops, name)(*args, **(options or {}))
    return args[0] if result is None else result


def call_spoilt(
    edits: Mapping[str, str], name: str, args: Sequence[Any], options: Mapping[str, Any] | None = None
) -> Any:
    """As :func:`call`, with pieces of the kernel's text replaced; every piece must occur."""
    from pcp_kernels import store

    generate = store.generate

    def spoilt(spec: Any, interpret: bool = False) -> str:
        text = generate(spec, interpret)
        for old, new in edits.items():
            assert old in text, f"{old!r} does not occur in\n{text}"
            text = text.replace(old, new)
        return text

    store.generate = spoilt
    store._load.cache_clear()
    try:
        return call(name, args, options)
    finally:
        store.generate = generate
        store._load.cache_clear()
