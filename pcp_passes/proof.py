# SPDX-License-Identifier: Apache-2.0
"""How far each feature has been proven. Written by hand, printed by ``pcp doctor``; a claim names what backs it.

A level says what was *run*, not what is believed: semantics carry over from CPU to GPU, but kernels, races, NCCL and
graph capture do not, and nothing here has run on a GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["executed on GPU", "executed on CPU with the real runner", "contract-tested", "read only"]


@dataclass(frozen=True)
class Proof:
    """One feature.

    Attributes:
        level: ``executed on GPU``; ``executed on CPU with the real runner``: in vLLM's Model Runner V2, compared with
            one rank; ``contract-tested``: without vLLM, against a reference or a recorded interface; ``read only``:
            the upstream source was read.
        by: the test, in the repository, that shows it; empty when the level is ``read only`` and nothing does.
        note: what the level does not cover.
    """

    feature: str
    level: Level
    by: str = ""
    note: str = ""


_EQUALITY = "tests/vllm/test_equality.py"
_CPU: Level = "executed on CPU with the real runner"

PROOFS: tuple[Proof, ...] = (
    Proof("vLLM 0.32", _CPU, _EQUALITY),
    Proof(
        "vLLM 0.33",
        "read only",
        "tests/unit/test_versions.py",
        "signatures and fields match its sources; the order of its calls was never executed",
    ),
    Proof("dense attention (GQA), PCP 2 and 4", _CPU, _EQUALITY),
    Proof(
        "latent attention (MLA), PCP 2 and 4",
        _CPU,
        _EQUALITY,
        "chunked prefill and prefix caching: tests/vllm/test_mla_chunked.py",
    ),
    Proof("sliding window, two KV cache groups", _CPU, _EQUALITY),
    Proof("attention sinks and mixture of experts, mode 2, PCP 2", _CPU, _EQUALITY, "in the full matrix only"),
    Proof("mode 2, whole graph: eager and Inductor", _CPU, _EQUALITY),
    Proof("mode 3, piecewise: eager and Inductor", _CPU, _EQUALITY, "with stand-ins for vLLM's CUDA-only parts"),
    Proof("decode replicate and owner", _CPU, _EQUALITY),
    Proof("layouts zigzag and contiguous", _CPU, _EQUALITY),
    Proof("chunked prefill and prefix caching (GQA)", _CPU, _EQUALITY),
    Proof("sampling, prompt logprobs, aborted requests", _CPU, _EQUALITY),
    Proof("MTP, both graphs rewritten (MLA and GQA), PCP 2", _CPU, "tests/vllm/test_mtp.py"),
    Proof("DSpark beside a sharded target, PCP 2", _CPU, "tests/vllm/test_dspark.py"),
    Proof("KV producer with a drafter", _CPU, "tests/vllm/test_connector.py"),
    Proof("FP8 KV cache (GQA) with MTP", _CPU, "tests/vllm/test_fp8_cache.py", "MLA: on the embedded engine"),
    Proof("pipeline parallel with MTP, PP 2 and PP 2 x PCP 2", _CPU, "tests/vllm/test_pipeline.py", "0.32 alone"),
    Proof("data and expert parallel, DP 2 x PCP 2, EP 4", _CPU, "tests/vllm/test_data_parallel.py", "over gloo"),
    Proof("vllm serve with replicas, DP 2 x PCP 2", _CPU, "tests/vllm/test_serve_replicas.py"),
    Proof("Prometheus metrics", _CPU, "tests/vllm/test_metrics.py"),
    Proof(
        "step program, embedded engine: MTP, DSpark, sparse MLA",
        "contract-tested",
        "tests/unit/engine/test_equality.py",
        "float64 on CPU: 2 and 4 ranks over gloo, up to 8 simulated; no GPU, no NCCL",
    ),
    Proof(
        "embedded engine over DP, PP, PCP, EP, fold_on_tp",
        "contract-tested",
        "tests/multiproc/test_mesh_ranks.py",
        "float64 on CPU: over gloo up to 5 ranks, simulated up to 8; no GPU, no NCCL",
    ),
    Proof(
        "ranks that diverge or are lost, over a mesh",
        "contract-tested",
        "tests/multiproc/test_divergence.py",
        "gloo; a wrong shape is named on one machine alone",
    ),
    Proof("vllm serve; a lost rank ends the others", _CPU, "tests/vllm/test_serve.py"),
    Proof("rank agreement and heartbeat", "contract-tested", "tests/multiproc/test_heartbeat.py"),
    Proof("all ranks simulated in one process", "contract-tested", "tests/unit/test_simulate.py"),
    Proof(
        "plain PyTorch: decorator and torch.compile backend",
        "contract-tested",
        "tests/multiproc/test_transformers_ranks.py",
        "CPU and gloo, 2 and 4 ranks, eager and Inductor; no GPU, no NCCL",
    ),
    Proof(
        "models of transformers 5.19, P 2, 3, 4",
        "contract-tested",
        "tests/unit/zoo/test_zoo_types.py",
        "ranks simulated; 5.24 was run by hand",
    ),
    Proof(
        "pcp::attend on CUDA (FlexAttention)",
        "contract-tested",
        "tests/unit/attention/test_flex.py",
        "never executed on a GPU; on CPU by flash parts, executed",
    ),
    Proof(
        "expand_slots in Triton",
        "contract-tested",
        "tests/unit/kernels/test_expand_slots.py",
        "Triton's interpreter, and compiled ahead of time; the vLLM front end uses the PyTorch form",
    ),
    Proof("tensor parallel beside PCP", "read only"),
    Proof("quantised KV cache", "read only"),
    Proof("FlashAttention and Triton attention back ends", "read only"),
    Proof("NCCL", "read only"),
)
