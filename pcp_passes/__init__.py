# SPDX-License-Identifier: Apache-2.0
"""Prefill context parallelism as graph passes.

Where to look:

* ``layout`` and ``plan``: which rank runs which tokens, as numpy arrays and as device buffers;
* ``ir`` and ``passes``: placements, markers, rules, invariants, and the rewrite of a captured model;
* ``simulate``: all ranks of a rewritten graph in one process;
* ``collectives`` and ``distributed``: the one collective of a body; agreement and heartbeat between ranks;
* ``frontends``: systems that graphs are captured from (vLLM);
* ``cli``: the ``pcp`` command.

Importing this package imports none of them.
"""

__version__ = "0.1.0"
