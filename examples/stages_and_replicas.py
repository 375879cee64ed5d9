# SPDX-License-Identifier: Apache-2.0
"""Two replicas of two pipeline stages of two PCP ranks that share their experts, against one rank: eight ranks here."""

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from pcp_passes.demo.checkpoints import checkpoint
from pcp_passes.engine.fleet import Fleet
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.simulated import SimulatedExecutor
from pcp_passes.frontends.transformers.mtp import load_mtp
from pcp_passes.frontends.transformers.target import load_target
from pcp_passes.passes import PassContext
from pcp_passes.speculative.mtp import MTP
from pcp_passes.step.program import StepProgram
from pcp_passes.step.stages import split_program

BEGIN = 256  # the model reads bytes, and this mark before a text
PROMPTS = (
    "The for statement is used to iterate over the elements of a sequence (such as a string, tuple or list) or other",
    "A class definition defines a class object. Classes can also be",
    "import",
)
STEPS = 2


def generate(target, mtp, **axes) -> tuple[StepProgram, Fleet, list]:
    """Continue all prompts on a mesh of simulated ranks; each goes to the replica with the fewest requests."""
    options = EngineOptions(budget=64, max_len=256, num_blocks=64, **axes)
    context = PassContext(options.pcp)
    program = StepProgram(target.over(context), MTP(mtp.over(context), STEPS), pcp=options.pcp)
    fleet = Fleet([SimulatedExecutor(program, options, replica=place) for place in range(options.dp)])
    names = [fleet.add_request([BEGIN, *text.encode()], SamplingParams(max_tokens=20)) for text in PROMPTS]
    outputs = fleet.run()
    return program, fleet, [outputs[name] for name in names]


def main() -> None:
    torch.set_grad_enabled(False)
    logging.set_verbosity_error()  # transformers does not know the MTP layer and would call it unexpected
    logging.disable_progress_bar()
    folder, alone = checkpoint(), PassContext(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    target = load_target(model, ctx=alone)
    mtp = load_mtp(model, folder, ctx=alone, own_embedding=True)  # the last stage has no table of the target's

    _, _, expected = generate(target, mtp)
    program, fleet, found = generate(target, mtp, dp=2, pp=2, pcp=2, expert_parallel=True)
    for one, many in zip(expected, found, strict=True):
        assert one.tokens == many.tokens, "the mesh changed what is generated"
        print(f"accepted {many.accepted}: {bytes(t for t in many.tokens if t < BEGIN).decode(errors='replace')!r}")
    for stage in split_program(program, 2):
        wires = " and ".join(
            f"{'top-k' if wire.dtype == torch.int32 else 'hidden state'} of {wire.shape[0]}" for wire in stage.wires_out
        )
        print(f"stage {stage.index} holds {', '.join(stage.cache_layers)} and sends {wires or 'nothing'} for each row")
    for place, engine in enumerate(fleet.engines):
        own, beside = len(engine.stats.records), engine.stats.dummy_steps
        print(f"replica {place}: {own} steps of its own, {beside} beside the other's")
    print("tokens are equal on one rank and on eight")


if __name__ == "__main__":
    main()
