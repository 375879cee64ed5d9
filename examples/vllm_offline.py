# SPDX-License-Identifier: Apache-2.0
"""Real vLLM with two PCP ranks on CPU, checked against transformers: a random Qwen3, 61 prompt tokens, 8 new ones.

    python examples/vllm_offline.py

One engine start (20 to 60 s), in a process group of its own. On a GPU the helper is not needed:

    LLM(model, prefill_context_parallel_size=2, additional_config={"pcp_passes": {}}, compilation_config={"mode": 3})
"""

import importlib.util
import json
import sys
import tempfile

import torch

from pcp_passes.frontends.vllm.session import Group, Request, Session, run

CONFIG = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # wide: at the usual 0.02 the next token depends on the last one alone
    "tie_word_embeddings": False,
    "eos_token_id": None,
}


def main() -> int:
    missing = [name for name in ("vllm", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}; this example needs the environment of `make setup`")
        return 0
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**CONFIG)).float().eval()
    prompt = torch.randint(0, CONFIG["vocab_size"], (61,))
    with torch.no_grad():
        generated = model.generate(prompt[None], max_new_tokens=8, do_sample=False, pad_token_id=0)
    expected = generated[0, len(prompt) :].tolist()

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        session = Session(
            model=folder,
            pcp=2,
            options={"decode": "replicate"},
            backend="eager",  # the rewritten graph as it is; "inductor" compiles it
            engine={"max_model_len": 128, "max_num_batched_tokens": 128},
            groups=(Group((Request(prompt.tolist(), max_tokens=8),)),),
        )
        print("LLM(**" + json.dumps(session.engine_arguments() | {"model": "..."}) + ")", flush=True)
        output = run(session, timeout_s=240).outputs[0][0]
    print(f"transformers  {expected}\nvLLM, PCP=2   {output.tokens}")
    return 0 if output.tokens == expected else 1


if __name__ == "__main__":
    sys.exit(main())
