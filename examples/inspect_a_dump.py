# SPDX-License-Identifier: Apache-2.0
"""Dump a rewrite, then look at it as one would at a stranger's: list it, diff two stages, ask why, check it.

    python examples/inspect_a_dump.py

A dump is a folder of text and a manifest; reading one runs nothing. PCP_DUMP=folder writes one wherever passes run.
"""

import os
import tempfile
from pathlib import Path

import torch
from shard_a_model import Decoder
from typer.testing import CliRunner

import pcp_passes
from pcp_passes.cli import app


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PCP_DUMP"] = folder
        ids = torch.randint(0, 256, (1, 37))
        pcp_passes.simulate_model(Decoder().eval(), {"input_ids": ids}, pcp=4)
        del os.environ["PCP_DUMP"]
        dump = next(Path(folder).rglob("manifest.json")).parent
        print("\n".join(sorted(path.name for path in dump.iterdir())))
        for command in (["diff", str(dump)], ["why", str(dump), "%linear"], ["check", str(dump)]):
            print("$ pcp", command[0], "DUMP", *command[2:])
            print("\n".join(CliRunner().invoke(app, command).output.splitlines()[:12]))


if __name__ == "__main__":
    main()
