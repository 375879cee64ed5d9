# SPDX-License-Identifier: Apache-2.0
"""Prefill context parallelism as graph passes.

Where to look:

* ``layout`` and ``plan``: which rank runs which tokens, as numpy arrays and as device buffers;
* ``ir`` and ``passes``: placements, markers, rules, invariants, and the rewrite of a captured model;
* ``simulate``: all ranks of a rewritten graph in one process;
* ``paged``: the paged KV cache and the ops of a body that write and read it;
* ``step`` and ``speculative``: a whole scheduling step as a graph; drafters, sampling, verification;
* ``engine``: the embedded engine, which runs step programs;
* ``collectives`` and ``distributed``: the one collective of a body; agreement and heartbeat between ranks;
* ``frontends``: systems that graphs are captured from (plain PyTorch, transformers, vLLM);
* ``cli``: the ``pcp`` command.

Importing this package imports none of them; the names of ``pcp_passes.api`` are loaded when first asked for::

    model = pcp_passes.context_parallel(model, tokens={"input_ids": 1})
    result = pcp_passes.simulate_model(model, inputs, pcp=4)
    report = pcp_passes.inspect_model(model, inputs, pcp=4)
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pcp_passes.api import ContextParallel as ContextParallel
    from pcp_passes.api import InspectReport as InspectReport
    from pcp_passes.api import context_parallel as context_parallel
    from pcp_passes.api import inspect_model as inspect_model
    from pcp_passes.api import simulate_model as simulate_model
    from pcp_passes.api import simulated as simulated

__version__ = "0.1.0"

_API = ("ContextParallel", "InspectReport", "context_parallel", "inspect_model", "simulate_model", "simulated")


def __getattr__(name: str) -> object:
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pcp_passes import api

    return getattr(api, name)
