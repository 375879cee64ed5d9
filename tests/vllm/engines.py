# SPDX-License-Identifier: Apache-2.0
"""The engines of the matrix, and a cache so that each is started once per test run."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pcp_passes.frontends.vllm.session import EngineFailed, Group, Result, Session, run
from tests.models import build
from tests.vllm import looks
from tests.vllm.cases import CASES, ragged, served

FULL = os.environ.get("PCP_TEST_FULL") == "1"
_started: list[str] = []
_results: dict[str, Result | EngineFailed] = {}
_failures: dict[str, EngineFailed] = {}
#: Functions that measure steps from inside a worker.
PROBE = "pcp_passes.frontends.vllm.probe"


@dataclass(frozen=True)
class Engine:
    """One point of the matrix. ``budget`` is the scheduler's token budget per step, ``drafts`` how many tokens the
    checkpoint's own module proposes per step. With drafts, a first group starts the probe and one after the others
    returns what it saw; so with ``probe``. ``compilation`` holds further keys of ``compilation_config``. ``doomed`` is
    a function run at last, after which the engine is expected to fail."""

    model: str
    pcp: int = 2
    mode: int = 2
    backend: str = "inductor"
    options: dict[str, Any] | None = field(default_factory=dict)
    budget: int = 512
    prefix_caching: bool = True
    cases: tuple[str, ...] = tuple(CASES)
    extra: tuple[Group, ...] = ()
    cache_root: str = ""
    drafts: int = 0
    doomed: str = ""
    probe: bool = False
    compilation: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        options = "stock" if self.options is None else ",".join(f"{k}={v}" for k, v in self.options.items())
        model = os.path.basename(self.model)
        drafts = f"-drafts{self.drafts}" if self.drafts else ""
        graphs = f"-{self.compilation['cudagraph_mode']}" if "cudagraph_mode" in self.compilation else ""
        return f"{model}-pcp{self.pcp}-mode{self.mode}-{self.backend}-budget{self.budget}{drafts}{graphs}-{options}"

    def groups(self) -> dict[str, Group]:
        """What the engine runs, by name and in order: ``probe``, the cases, ``probed``, then the extra groups."""
        found = {"probe": Group(rpc=(f"{PROBE}:start",))} if self.drafts or self.probe else {}
        found |= {name: CASES[name]() for name in self.cases}
        found |= {f"extra {i}": group for i, group in enumerate(self.extra)}
        found |= {"probed": Group(rpc=(f"{PROBE}:stop",))} if self.drafts or self.probe else {}
        if self.doomed:
            found["doomed"] = Group(ragged().requests, (self.doomed,))
        return found

    def session(self) -> Session:
        """The session that starts this engine and runs its cases."""
        cached = {"VLLM_CACHE_ROOT": self.cache_root, "TORCHINDUCTOR_CACHE_DIR": f"{self.cache_root}/inductor"}
        env = cached if self.cache_root else {"VLLM_DISABLE_COMPILE_CACHE": "1"}
        engine: dict[str, Any] = {
            "max_model_len": 256,
            "max_num_seqs": 32,
            "max_num_batched_tokens": self.budget,
            "enable_prefix_caching": self.prefix_caching,
            "enable_chunked_prefill": True,
        }
        if "mla" not in self.model:
            engine["block_size"] = 32
        if self.drafts:
            engine["speculative_config"] = {"method": "mtp", "num_speculative_tokens": self.drafts}
        return Session(
            model=str(build(self.model)) if not os.path.isdir(self.model) else self.model,
            groups=tuple(self.groups().values()),
            pcp=self.pcp,
            options=self.options,
            mode=self.mode,
            backend=self.backend,
            compilation=self.compilation,
            engine=engine,
            env=env,
        )


def reference(model: str, extra: Sequence[Group] = ()) -> Engine:
    """Stock vLLM on one rank: the plugin is loaded and off."""
    groups = (*extra, Group(served())) if model == "tiny_gqa" else tuple(extra)
    return Engine(model, pcp=1, backend="eager", options=None, prefix_caching="mla" not in model, extra=groups)


def result_of(engine: Engine) -> Result:
    """Start ``engine`` and return what it answered; once per test run, also when it fails."""
    key = json.dumps(asdict(engine.session()), sort_keys=True)
    if key not in _results:
        _started.append(str(engine))
        try:
            _results[key] = run(engine.session(), timeout_s=420)
        except EngineFailed as failure:
            _results[key] = failure
            if (
                engine.doomed
                and failure.finished is not None
                and len(failure.finished.outputs) == len(engine.groups()) - 1
            ):
                _results[key] = failure.finished
                _failures[key] = failure
    found = _results[key]
    if isinstance(found, EngineFailed):
        raise found
    return found


def failure_of(engine: Engine) -> EngineFailed:
    """How an engine that was doomed failed."""
    result_of(engine)
    return _failures[json.dumps(asdict(engine.session()), sort_keys=True)]


def starts() -> list[str]:
    """Engines started so far in this test run."""
    return list(_started)


@functools.cache
def scratch_cache() -> str:
    """A compile-cache root of this test run."""
    return tempfile.mkdtemp(prefix="pcp-vllm-cache-")


def _asks(name: str) -> Group:
    return Group(rpc=(looks.qualified(name),))


#: Stock vLLM with its own batch manager and its own gathers; it serves MLA models only.
NATIVE_MLA = Engine("tiny_mla", mode=0, options=None, prefix_caching=False)
#: Mode 3 with vLLM's real split; each piece runs as a graph module, so that it can be looked at.
PIECEWISE = Engine("tiny_sliding", mode=3, backend="eager", options={}, extra=(_asks("pieces"),))
#: Mode 3 with Inductor and a compile cache of this test run, which starts empty.
COLD = Engine(
    "tiny_gqa",
    mode=3,
    options={},
    budget=64,
    cache_root=scratch_cache(),
    extra=(
        _asks("compilations"),
        Group(ragged(seed=9).requests, (looks.qualified("count_variants"),)),
        _asks("variants_used"),
        _asks("last_sampled"),
    ),
)
#: Our pass on latent attention, on as many ranks as the native oracle.
MLA = Engine("tiny_mla", mode=3, options={"decode": "owner"}, prefix_caching=False)
#: The same engine again.
WARM = replace(COLD, cases=("ragged",), extra=(_asks("compilations"),))
#: The same cache, another option.
CHANGED = replace(WARM, options={"decode": "owner"})
