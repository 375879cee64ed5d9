# SPDX-License-Identifier: Apache-2.0
"""Doubles of what vLLM gives the hooks of piecewise CUDA graphs, for tests without vLLM."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pcp_passes.frontends.vllm.replay_check import ReplayCheck
from pcp_passes.frontends.vllm.runtime import Runtime
from pcp_passes.options import PcpOptions


class Mode(Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)


class Vllm:
    """The modules that a wrapper asks: which batch runs, and whether capturing is allowed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.mode, self.rows, self.capturing = Mode.PIECEWISE, 8, True
        modules: dict[str, dict[str, Any]] = {
            "vllm": {},
            "vllm.compilation": {},
            "vllm.config": {"CUDAGraphMode": Mode},
            "vllm.forward_context": {"get_forward_context": self.context, "is_forward_context_available": lambda: True},
            "vllm.compilation.monitor": {
                "validate_cudagraph_capturing_enabled": self.validate,
                "set_cudagraph_capturing_enabled": lambda enabled: setattr(self, "capturing", enabled),
            },
        }
        for name, values in modules.items():
            module = ModuleType(name)
            vars(module).update(values)
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(ReplayCheck, "instances", [])

    def context(self) -> Any:
        return SimpleNamespace(batch_descriptor=Descriptor(self.rows), cudagraph_runtime_mode=self.mode)

    def validate(self) -> None:
        if not self.capturing:
            raise RuntimeError("CUDA graph capturing detected at an inappropriate time.")


@dataclass(frozen=True)
class Descriptor:
    num_tokens: int


class Manager:
    def __init__(self, decode: Any = "replicate") -> None:
        self.runtime = Runtime(PcpOptions(decode=decode), pcp=2, rank=0)
        self.input_buffers = "rank-local"
        self.runner = SimpleNamespace(input_buffers="global")

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[str, int]:
        return "tables", num_reqs

    def get_dummy_slot_mappings(self, num_tokens: int) -> tuple[str, int]:
        return "slots", 2 * num_tokens


def configuration(
    *, budget: int = 64, requests: int = 4, pcp: int = 2, drafts: int = 0, mode: Mode = Mode.PIECEWISE, **values: Any
) -> Any:
    speculative = SimpleNamespace(num_speculative_tokens=drafts, method="mtp") if drafts else None
    compilation = {"cudagraph_mode": mode, "cudagraph_capture_sizes": [], "compile_sizes": None, "splitting_ops": []}
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=budget, max_num_seqs=requests),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=pcp),
        speculative_config=speculative,
        compilation_config=SimpleNamespace(**(compilation | values)),
        additional_config={"pcp_passes": {}},
    )


class Graphs:
    """vLLM's graph manager: what it captures, largest first. At most 4 requests with 2 drafts decode."""

    def __init__(self, sizes: tuple[int, ...] = (32, 16, 8, 4)) -> None:
        self.vllm_config = configuration(requests=4, drafts=2)
        self._capture_descs = {Mode.PIECEWISE: [Descriptor(size) for size in sizes]}

    @property
    def sizes(self) -> list[int]:
        return [desc.num_tokens for desc in self._capture_descs[Mode.PIECEWISE]]
