# SPDX-License-Identifier: Apache-2.0
"""Put on ``PYTHONPATH`` by ``cpu_runner.environment``, so that spawned workers get its stand-ins too."""

import os

if os.environ.get("PCP_PASSES_CPU_RUNNER") == "1":
    from pcp_passes.frontends.vllm import cpu_runner

    cpu_runner.install()
