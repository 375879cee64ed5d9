# SPDX-License-Identifier: Apache-2.0
"""Registration of this package's custom ops in the ``pcp`` namespace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

NAMESPACE = "pcp"
_LIBRARY: Any = torch.library.Library(NAMESPACE, "FRAGMENT")


def define(schema: str, body: Callable[..., Any], fake: Callable[..., Any], tags: Sequence[torch.Tag] = ()) -> Any:
    """Register ``pcp::<schema>`` with one body for all devices and a fake; returns the ``OpOverload``.

    A plain library entry costs a few microseconds a call; ``torch.library.custom_op`` costs several times as much, and
    the body of a model calls one of these per layer.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=tuple(tags))
    _LIBRARY.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.pcp, name).default
