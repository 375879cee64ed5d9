# SPDX-License-Identifier: Apache-2.0
"""Engine arguments that must be refused, and some that must not: the data of ``test_refusals``."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from pcp_passes.frontends.vllm import cpu_graphs

OURS = "pcp_passes.frontends.vllm.backend."
MODEL = {"gqa": "tiny_gqa", "mla": "tiny_mla", "mtp": "tiny_mla_mtp", "moe": "tiny_mla_moe"}
#: Configurations without weights: vLLM's class for the first has no import that the text-only environment lacks.
FOREIGN = {
    "audio": ("qwen2_audio", "Qwen2AudioForConditionalGeneration"),
    "encoder-decoder": ("t5", "T5ForConditionalGeneration"),
    "two modules": ("deepseek_v3", "DeepseekV3ForCausalLM"),
    "dsa": ("glm_moe_dsa", "GlmMoeDsaForCausalLM"),
    "hybrid": ("falcon_h1", "FalconH1ForCausalLM"),
}


@dataclass(frozen=True)
class Case:
    """Engine arguments on top of a plain PCP=2 engine, and fragments of the message that refuses them: what was
    found, what is required or what to do. No fragment: the arguments are accepted."""

    message: tuple[str, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    options: Any = field(default_factory=dict)
    key: str = "pcp_passes"
    env: dict[str, str | None] = field(default_factory=dict)
    model: str = "gqa"


def compilation(**values: Any) -> dict[str, Any]:
    return {"compilation_config": {"mode": 2, **values}}


def mtp(count: int, **values: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": count, **values}}


def ngram() -> dict[str, Any]:
    return {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}}


def pieces(**values: Any) -> dict[str, Any]:
    """Piecewise CUDA graphs."""
    return compilation(**({"mode": 3, "cudagraph_mode": "PIECEWISE"} | values))


#: An indexer in the first layers and in every fourth after them, so that layer 39 of 78 has none.
SHARING = {"num_hidden_layers": 78, "index_topk_freq": 4, "index_skip_topk_offset": 3}

_MODE_3 = {"PCP_PASSES_CPU_MODE_3": "1"}
#: The stand-ins that take graph modes on CPU.
_GRAPHS = {**_MODE_3, cpu_graphs.SWITCH: "1"}
_NO_PASS = 'set compilation_config to {"mode": 2}; mode 3 needs CUDA'

CASES: dict[str, Case] = {
    # Options.
    "unknown option": Case(("'layuot'", "accepted: ", "Did you mean 'layout'?"), options={"layuot": "zigzag"}),
    "unknown value": Case(("pcp_passes.decode 'onwer'", "'replicate'", "mean 'owner'?"), options={"decode": "onwer"}),
    "wrong type": Case(("pcp_passes.poison", "true or false", "'yes'"), options={"poison": "yes"}),
    "not a mapping": Case(("must be a mapping", "'rewrite'", 'write {"mode": "rewrite"}'), options="rewrite"),
    "interleave": Case(("'interleave'", "'zigzag'", "paged back end cannot batch"), options={"layout": "interleave"}),
    "misspelt key": Case(("'pcp-passes'", "additional_config", "Did you mean 'pcp_passes'?"), key="pcp-passes"),
    "ranks without check": Case(("ranks=4", "mode='check'", "Drop pcp_passes.ranks"), options={"ranks": 4}),
    # Parallelism.
    "dcp": Case(("decode_context_parallel_size=2", "replicated", "to 1"), {"decode_context_parallel_size": 2}),
    "dcp with mla": Case(("decode_context_parallel_size=2",), {"decode_context_parallel_size": 2}, model="mla"),
    "more stages than layers": Case(
        ("_size=5 stages", "has 3", "lower pipeline_parallel_size"), {"pipeline_parallel_size": 5}
    ),
    "n-gram drafts over stages": Case(
        ("method 'ngram'", "over pipeline_parallel_size=2 stages", "use 'mtp'"),
        {"pipeline_parallel_size": 2, **ngram()},
    ),
    "n-gram drafts over stages alone": Case(
        ("method 'ngram'", "over pipeline_parallel_size=2 stages", "use 'mtp'"),
        {"pipeline_parallel_size": 2, "prefill_context_parallel_size": 1, **ngram()},
    ),
    "n-gram drafts over stages under check": Case(
        ("method 'ngram'", "over pipeline_parallel_size=2 stages"),
        {"pipeline_parallel_size": 2, "prefill_context_parallel_size": 1, **ngram()},
        {"mode": "check", "ranks": 2},
    ),
    "stage on a shared selection": Case(
        ("start at layers [39]", "vLLM sends none", "VLLM_PP_LAYER_PARTITION"),
        {"pipeline_parallel_size": 2, "hf_overrides": SHARING},
        model="dsa",
    ),
    "stage on a shared selection alone": Case(
        ("start at layers [39]",),
        {"pipeline_parallel_size": 2, "prefill_context_parallel_size": 1, "hf_overrides": SHARING},
        model="dsa",
    ),
    "recurrent state over stages": Case(
        ("recurrent state", "PP2xPCP2", "attention layers only"), {"pipeline_parallel_size": 2}, model="hybrid"
    ),
    "latent attention and a scheduler that runs ahead": Case(
        ("async_scheduling=true", "latent attention on CPU", "to false"),
        {"async_scheduling": True, **mtp(2)},
        model="mtp",
        env={"PCP_PASSES_CPU_ASYNC": "1"},
    ),
    "experts over replicas": Case(
        ("data_parallel_size=2 without expert", "set enable_expert_parallel"), {"data_parallel_size": 2}, model="moe"
    ),
    "experts over replicas and tensor ranks": Case(
        ("data_parallel_size=2 with tensor_parallel_size=2", "never run on a CPU"),
        {"data_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True},
        model="moe",
    ),
    "folded": Case(("fold_on_tp=true", "give PCP ranks of its own"), options={"fold_on_tp": True}),
    "network cards of replicas": Case(
        ("VLLM_GPU_NIC_PCIE_MAPPING", "data_parallel_size=2", "drop it"),
        {"data_parallel_size": 2},
        env={"VLLM_GPU_NIC_PCIE_MAPPING": "{}"},
    ),
    "one worker": Case(("='uni'", "size=2 needs", "set it to 'mp'"), {"distributed_executor_backend": "uni"}),
    "overlap": Case(("enable_dbo=True", "drop both"), {"enable_dbo": True}),
    # Models.
    "multimodal": Case(("Qwen2Audio", "is multimodal", "text-only"), model="audio"),
    "encoder-decoder": Case(("T5", "is an encoder-decoder", "decoder-only"), model="encoder-decoder"),
    "no indexer": Case(("index_topk=64", "needs index_n_heads"), {"hf_overrides": {"index_topk": 64}}, model="mla"),
    "fp4 index keys": Case(
        ("index_topk=2048", "indexer_kv_dtype='mxfp4'", "['auto', 'bf16', 'fp8']"),
        {"attention_config": {"indexer_kv_dtype": "mxfp4"}},
        model="dsa",
    ),
    "fp4 index keys on one rank": Case(
        ("indexer_kv_dtype='mxfp4'",),
        {"attention_config": {"indexer_kv_dtype": "mxfp4"}, "prefill_context_parallel_size": 1},
        model="dsa",
    ),
    "sparse mla under check": Case(
        ("mode='check'", "graphs of 2 ranks", "prefill_context_parallel_size to 1"),
        options={"mode": "check"},
        model="dsa",
    ),
    "fp8 latents": Case(("kv_cache_dtype='fp8", "to 'auto'"), {"kv_cache_dtype": "fp8"}, model="dsa"),
    "sparse kv producer": Case(
        ("index_topk=2048", "drop kv_transfer_config"),
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_producer"}},
        model="dsa",
    ),
    "breakable graphs": Case(("=1 runs models without a graph", "unset it"), env={"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}),
    # Features.
    "lora": Case(("LoRA", "drop enable_lora"), {"enable_lora": True}),
    "pooling": Case(("'pooling' runner", "runner='generate'"), {"runner": "pooling"}),
    "n-gram drafts": Case(
        ("method 'ngram'", "use 'mtp' or 'dspark'", "drop speculative_config"),
        ngram(),
    ),
    "several draft modules": Case(
        ("num_nextn_predict_layers=2", "num_speculative_tokens=2", "use 2 of them", "num_speculative_tokens to 1"),
        mtp(2),
        model="two modules",
    ),
    "fast prefill": Case(("kv_sharing_fast_prefill=True", "drop it"), {"kv_sharing_fast_prefill": True}),
    "uneven nodes": Case(("nnodes=3", "2 workers (TP=1 x PP=1 x PCP=2)", "evenly"), {"nnodes": 3}),
    "shared selection": Case(("share_topk='owner'", "to 'off'"), mtp(2), {"share_topk": "owner"}, model="mtp"),
    "kv consumer": Case(
        ("kv_role='kv_both'", "to 'kv_producer'"),
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
    ),
    "kv producer over stages": Case(
        ("over pipeline_parallel_size=2 stages", "drop kv_transfer_config"),
        {
            "pipeline_parallel_size": 2,
            "kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_producer"},
        },
    ),
    "kv connector": Case(
        ("SimpleCPUOffloadConnector", "use ExampleConnector"),
        {"kv_transfer_config": {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_producer"}},
    ),
    "prompt embeddings": Case(("drop enable_prompt_embeds",), {"enable_prompt_embeds": True}),
    "routed experts": Case(("drop enable_return_routed_experts",), {"enable_return_routed_experts": True}),
    "several positions": Case(
        ("M-RoPE", "use another model"),
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4]}}},
    ),
    # Compilation: whatever would run the model without the passes.
    "eager": Case(("enforce_eager", "drop it", "mode to off"), {"enforce_eager": True}),
    "mode 0": Case(("compilation mode 0", _NO_PASS), compilation(mode=0)),
    "mode 1": Case(("compilation mode 1", _NO_PASS), compilation(mode=1)),
    "mode 3 on cpu": Case(("compilation mode 2", "'inductor'", _NO_PASS), compilation(mode=3)),
    "-O0": Case(("compilation mode 0", _NO_PASS), {"compilation_config": {}, "optimization_level": 0}),
    "mode 0 under check": Case(("compilation mode 0", _NO_PASS), compilation(mode=0), options={"mode": "check"}),
    "foreign back end": Case(("'aot_eager'", "['inductor', 'eager']"), compilation(backend="aot_eager")),
    "graph partition, mode 2": Case(
        ("use_inductor_graph_partition=true", "set it to false"), compilation(use_inductor_graph_partition=True)
    ),
    "graph partition, mode 3": Case(
        ("use_inductor_graph_partition=true", "set it to false"),
        compilation(mode=3, use_inductor_graph_partition=True),
        env=_MODE_3,
    ),
    "aot": Case(("VLLM_USE_AOT_COMPILE=1", "unset it"), env={"VLLM_USE_AOT_COMPILE": "1"}),
    "graphs on cpu": Case(("=PIECEWISE", "needs a CUDA device", "to NONE"), compilation(cudagraph_mode="PIECEWISE")),
    "whole graphs": Case(
        ("cudagraph_mode=FULL puts attention and collectives of mixed batches", "set it to PIECEWISE"),
        pieces(cudagraph_mode="FULL"),
        env=_GRAPHS,
    ),
    "whole graphs of decode steps": Case(
        ("cudagraph_mode=FULL_DECODE_ONLY chooses", "global number of requests", "set it to PIECEWISE"),
        pieces(cudagraph_mode="FULL_DECODE_ONLY"),
        env=_GRAPHS,
    ),
    "whole graphs and pieces": Case(
        ("cudagraph_mode=FULL_AND_PIECEWISE chooses", "rank-local", "set it to PIECEWISE"),
        pieces(cudagraph_mode="FULL_AND_PIECEWISE"),
        env=_GRAPHS,
    ),
    "whole graphs and pieces, mode 2": Case(
        ("cudagraph_mode=FULL_AND_PIECEWISE chooses", "set it to PIECEWISE"),
        pieces(cudagraph_mode="FULL_AND_PIECEWISE", mode=2),
        env=_GRAPHS,
    ),
    "fused attention": Case(
        ("pass_config.fuse_attn_quant=true puts attention inside", "fuse_attn_quant to false"),
        pieces(pass_config={"fuse_attn_quant": True}),
        env=_GRAPHS,
    ),
    "sizes above the budget": Case(
        ("no size to capture of at most max_num_batched_tokens=512", "name smaller"),
        {"max_num_batched_tokens": 512, "max_num_seqs": 32} | pieces(cudagraph_capture_sizes=[520, 1024]),
        env=_GRAPHS,
    ),
    "graphs without pieces": Case(
        ("compilation mode 2 makes none", "mode to 3, or cudagraph_mode to NONE"), pieces(mode=2), env=_GRAPHS
    ),
    "graphs without splits": Case(
        ("splitting_ops=[] leaves attention inside", "leave splitting_ops out"), pieces(splitting_ops=[]), env=_GRAPHS
    ),
    "graphs and a replicated drafter": Case(
        ("drafter='replicate' is not supported", "to 'shard'"),
        pieces() | mtp(1),
        {"drafter": "replicate"},
        env=_GRAPHS,
        model="mtp",
    ),
    "compiled sizes by tokens": Case(
        ("compile_sizes=[512]", "rows of one rank", "at most 272", "max_num_batched_tokens=512 over 2 ranks"),
        {"max_num_batched_tokens": 512, "max_num_seqs": 32, **compilation(mode=3, compile_sizes=[16, 512])},
        env=_MODE_3,
    ),
    # The runner.
    "v1 runner": Case(("VLLM_USE_V2_MODEL_RUNNER=0", "unset"), env={"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "no triton": Case(("Triton found no device", "cpu_runner.enable()"), env={"VLLM_USE_V2_MODEL_RUNNER": None}),
    # Accepted.
    "plain": Case(),
    "kv producer": Case((), {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_producer"}}),
    "mla": Case(model="mla"),
    "stages": Case((), {"pipeline_parallel_size": 2}),
    "stages and drafts": Case((), {"pipeline_parallel_size": 2, **mtp(2)}, model="mtp"),
    "stages alone": Case((), {"pipeline_parallel_size": 2, "prefill_context_parallel_size": 1}),
    "stages that start on layers with an indexer": Case(
        (),
        {"pipeline_parallel_size": 2, "hf_overrides": SHARING},
        env={"VLLM_PP_LAYER_PARTITION": "38,40"},
        model="dsa",
    ),
    "experts over stages alone": Case(
        (),
        {"pipeline_parallel_size": 2, "prefill_context_parallel_size": 1, "enable_expert_parallel": True},
        model="moe",
    ),
    "recurrent state over stages alone": Case(
        (), {"pipeline_parallel_size": 2, "prefill_context_parallel_size": 1}, model="hybrid"
    ),
    "replicas": Case((), {"data_parallel_size": 2}),
    "replicas of experts": Case((), {"data_parallel_size": 2, "enable_expert_parallel": True}, model="moe"),
    "sparse mla": Case((), {"attention_config": {"indexer_kv_dtype": "fp8"}}, model="dsa"),
    "mtp": Case((), mtp(3), model="mtp"),
    "mtp replicated": Case((), mtp(1), {"drafter": "replicate", "verify_tokens": "broadcast"}, model="mtp"),
    "one of several draft modules": Case((), mtp(1), model="two modules"),
    "no mode asked for": Case((), {"compilation_config": {}}),
    "back end by name": Case((), compilation(backend="eager")),
    "mode 3": Case((), compilation(mode=3), env=_MODE_3),
    "piecewise graphs": Case(
        (),
        {"max_num_batched_tokens": 512, "max_num_seqs": 32}
        | pieces(cudagraph_capture_sizes=[8, 256, 320, 400, 512], compile_sizes=["cudagraph_capture_sizes", 100]),
        env=_GRAPHS,
    ),
    "piecewise graphs, sizes left out": Case(
        (), {"max_num_batched_tokens": 2048, "max_num_seqs": 32} | pieces(), env=_GRAPHS
    ),
    "piecewise graphs, largest size": Case(
        (),
        {"max_num_batched_tokens": 512, "max_num_seqs": 32, "max_cudagraph_capture_size": 16} | pieces(),
        env=_GRAPHS,
    ),
    "some splits": Case((), pieces(splitting_ops=["vllm::unified_attention_with_output"]), env=_GRAPHS),
    "check on one rank": Case((), {"prefill_context_parallel_size": 1}, options={"mode": "check", "ranks": 4}),
    "sparse mla, check on one rank": Case(
        (), {"prefill_context_parallel_size": 1}, options={"mode": "check", "ranks": 4}, model="dsa"
    ),
    "one rank, eager": Case((), {"prefill_context_parallel_size": 1, "enforce_eager": True}),
    "another plugin's key": Case((), key="someone_else"),
}

#: What no configuration on CPU reaches: vLLM settles these otherwise there.
ELSEWHERE = {
    "graph_mode": (
        {"compilation_config": SimpleNamespace(cudagraph_mode=SimpleNamespace(name="FULL"))},
        {"compilation_config": SimpleNamespace(cudagraph_mode=SimpleNamespace(name="NONE"))},
        ("cudagraph_mode=FULL puts", "set it to PIECEWISE"),
    ),
    "draft_cache": (
        {
            "speculative_config": SimpleNamespace(
                use_gemma4_mtp=lambda: True, draft_model_config=SimpleNamespace(architectures=["Gemma4MTP"])
            )
        },
        {"speculative_config": None},
        ("(Gemma4MTP)", "its target's cache", "drop speculative_config"),
    ),
    "draft_counts": (
        {"speculative_config": SimpleNamespace(enable_adaptive_verification=True)},
        {"speculative_config": SimpleNamespace(enable_adaptive_verification=False)},
        ("enable_adaptive_verification=true", "drop it"),
    ),
    "_prompt_window": (
        {"model_config": SimpleNamespace(rswa_window=128)},
        {"model_config": SimpleNamespace(rswa_window=None)},
        ("(128)", "not supported"),
    ),
    "sparse_attention": (
        {"model_config": SimpleNamespace(hf_text_config=SimpleNamespace(index_topk=64))},
        {"model_config": SimpleNamespace(hf_text_config=SimpleNamespace())},
        ("index_topk=64", "on CPU only so far", "use a dense-attention model"),
    ),
    "_experts_off_cpu": (
        {"model_config": SimpleNamespace(is_moe=True, architectures=["MixtralForCausalLM"])},
        {"model_config": SimpleNamespace(is_moe=False, architectures=["LlamaForCausalLM"])},
        ("Mixtral", "on CPU only", "use a dense model"),
    ),
}
