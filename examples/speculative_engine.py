# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding on the embedded engine: a sparse-attention model and its MTP layer, on one rank and on four."""

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from pcp_passes.demo.checkpoints import checkpoint
from pcp_passes.engine.engine import Engine
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.simulated import SimulatedExecutor
from pcp_passes.frontends.transformers.mtp import load_mtp
from pcp_passes.frontends.transformers.target import load_target
from pcp_passes.passes import PassContext
from pcp_passes.speculative.mtp import MTP
from pcp_passes.step.program import StepProgram

BEGIN = 256  # the model reads bytes, and this mark before a text
PROMPTS = (
    "The for statement is used to iterate over the elements of a sequence (such as a string, tuple or list) or other",
    "A class definition defines a class object. Classes can also be",
    "import",
)
STEPS = 3


def generate(target, mtp, pcp: int) -> tuple[Engine, list]:
    """Continue all prompts on ``pcp`` simulated ranks: long ones in chunks, beside what is already decoding."""
    context = PassContext(pcp)
    program = StepProgram(target.over(context), MTP(mtp.over(context), STEPS), pcp=pcp)
    options = EngineOptions(pcp=pcp, budget=64, max_len=256, num_blocks=64)
    engine = Engine(SimulatedExecutor(program, options))
    names = [
        engine.add_request([BEGIN, *text.encode()], SamplingParams(max_tokens=24, temperature=0.3 * i, seed=i))
        for i, text in enumerate(PROMPTS)
    ]
    outputs = engine.run()
    return engine, [outputs[name] for name in names]


def main() -> None:
    torch.set_grad_enabled(False)
    logging.set_verbosity_error()  # transformers does not know the MTP layer and would call it unexpected
    folder = checkpoint()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    target = load_target(model, ctx=PassContext(1))
    mtp = load_mtp(model, folder, ctx=PassContext(1))
    _, alone = generate(target, mtp, 1)
    engine, together = generate(target, mtp, 4)
    for one, four in zip(alone, together, strict=True):
        assert (one.tokens, one.accepted) == (four.tokens, four.accepted), "ranks changed what is generated"
        print(f"accepted {four.accepted}: {bytes(t for t in four.tokens if t < BEGIN).decode(errors='replace')!r}")
    first = engine.stats.records[0]
    print(f"first step: {first.tokens} tokens, {first.rows_per_rank} rows per rank, {first.bytes:,} bytes sent by each")
    print(f"tokens per verification: {engine.summary()['acceptance']['acceptance_length']:.2f}; equal on 1 and 4 ranks")


if __name__ == "__main__":
    main()
