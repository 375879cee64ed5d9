# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what a printed graph names but this process does not have.

The printer shows each as the text it was read from, so that a dump of another machine can be looked at, compared and
explained here. None of them can run on tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn

from pcp_passes.errors import PcpError
from pcp_passes.ir import fakes


class UnknownOp:
    """A call target that is not loaded: ``vllm.unified_attention`` where there is no vLLM.

    It carries the qualified name that rules are keyed by. On example values it gives what the text states.
    """

    def __init__(self, text: str, stated: object) -> None:
        namespace, _, rest = text.partition(".")
        self.text = text
        self.stated = stated
        self.__module__ = namespace
        self.__name__ = rest.partition(".")[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        held = [*args, *kwargs.values()]
        if fakes.fake_mode_of(held) is None and any(True for _ in fakes.tensors_in(held)):
            self._refuse()
        return self.stated

    def _refuse(self) -> NoReturn:
        raise PcpError(f"{self.text} is not loaded here: it cannot run. Import the library that defines it first.")

    def __repr__(self) -> str:
        return f"<{self.text}>"


@dataclass(frozen=True)
class UnknownValue:
    """An argument or a value that has no text of its own: printed as ``text``."""

    text: str


class UnreadConstant(nn.Module):
    """A constant whose contents were not beside the text; ``digest`` is what the printer shows of it."""

    def __init__(self, digest: str) -> None:
        super().__init__()
        self.digest = digest


@dataclass(frozen=True)
class Layer:
    """A hoisted layer name whose class is not loaded here (printed ``layer 'model.layers.0'``)."""

    value: str
