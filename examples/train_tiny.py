# SPDX-License-Identifier: Apache-2.0
"""Train the checkpoints of `examples/checkpoints`: a byte-level GLM-MoE-DSA with an MTP layer, and a block drafter.

    python examples/train_tiny.py                # seconds: a few steps of every phase, into a temporary folder
    python examples/train_tiny.py OUT            # the real run, about 12 minutes of one core
    python examples/train_tiny.py OUT --quick    # the short form, kept in OUT
    python examples/train_tiny.py OUT --block    # the last phase only, on the target in OUT

The text is that of the running Python. Five phases; what one learns is frozen in the later ones, unless listed again:

    dense      target and MTP layer, full attention
    indexer    the indexers: match the attention that they replace
    sparse     target and MTP layer, attending to what the indexers select
    draft      the MTP layer fed with its own states, three steps deep
    block      the block drafter, on the target's intermediate states
"""

import argparse
import logging
import tempfile
from pathlib import Path

import torch
import transformers
from tiny.recipe import train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("output", type=Path, nargs="?", help="folder to write to; without it, the short form")
    parser.add_argument("--quick", action="store_true", help="two steps of each phase")
    parser.add_argument("--block", action="store_true", help="the block drafter only, on OUTPUT/tiny-glm-dsa")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # It reports the MTP layer, which it does not know, as unexpected.
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    if arguments.output is None:
        with tempfile.TemporaryDirectory() as scratch:
            train(Path(scratch), quick=True)
    else:
        train(arguments.output, arguments.quick, arguments.block)


if __name__ == "__main__":
    main()
