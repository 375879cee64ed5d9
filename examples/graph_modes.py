# SPDX-License-Identifier: Apache-2.0
"""Graph modes of the embedded engine: the same requests in pieces, in whole graphs, and without either.

Here a replay checker stands in for CUDA graphs, so that a CPU shows which graph each body call takes.
"""

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from pcp_passes.demo.checkpoints import checkpoint
from pcp_passes.engine.engine import Engine
from pcp_passes.engine.graphs import make_buckets
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.simulated import SimulatedExecutor
from pcp_passes.frontends.transformers.mtp import load_mtp
from pcp_passes.frontends.transformers.target import load_target
from pcp_passes.passes import PassContext
from pcp_passes.speculative.mtp import MTP
from pcp_passes.step.program import StepProgram

BEGIN = 256  # the model reads bytes, and this mark before a text
PROMPTS = ("A class definition defines a class object. Classes can also be", "import", "def ")
STEPS, PCP = 3, 2


def generate(program: StepProgram, options: EngineOptions) -> tuple[list, dict]:
    """Tokens and accepted drafts of every request, and what the engine counted."""
    engine = Engine(SimulatedExecutor(program, options))  # captures every graph that a step may take
    names = [
        engine.add_request([BEGIN, *text.encode()], SamplingParams(max_tokens=12 + 6 * i))
        for i, text in enumerate(PROMPTS)
    ]
    outputs = engine.run()
    return [(outputs[name].tokens, outputs[name].accepted) for name in names], engine.summary()


def main() -> None:
    torch.set_grad_enabled(False)
    logging.set_verbosity_error()  # transformers does not know the MTP layer and would call it unexpected
    folder, context = checkpoint(), PassContext(PCP)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    program = StepProgram(load_target(model, ctx=context), MTP(load_mtp(model, folder, ctx=context), STEPS), pcp=PCP)

    expected = None
    for mode in ("none", "piecewise", "full_decode_only", "full_and_piecewise"):
        options = EngineOptions(pcp=PCP, budget=64, max_len=128, num_blocks=32, max_requests=4, graph_mode=mode)
        found, summary = generate(program, options)
        expected = found if expected is None else expected
        assert found == expected, f"{mode} changed what is generated"
        print(f"\n{mode}: {summary['steps']} steps, {summary['graph_padding_rows']} rows that only fill buckets")
        if mode != "none":
            buckets = make_buckets(options, STEPS)
            print(f"  buckets    rows {buckets.rows}, requests {buckets.requests}")
        for call, hits in summary["graph_hits"].items():
            print(f"  {hits:>4} calls  {call}")
        for reason, steps in summary["steps_without_graph"].items():
            print(f"  {steps} steps without a graph: {reason}")
    print(f"\ntokens and accepted drafts are equal in every mode, on {PCP} ranks")


if __name__ == "__main__":
    main()
