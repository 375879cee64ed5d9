# SPDX-License-Identifier: Apache-2.0
"""Where the trained tiny models are: beside the examples of a clone, which an editable install reads as well."""

from __future__ import annotations

from pathlib import Path

import pcp_passes
from pcp_passes.errors import ConfigError

TARGET = "tiny-glm-dsa"
"""A byte-level GLM-MoE-DSA with a trained MTP layer."""
BLOCK_DRAFTER = "tiny-dspark"
"""A DSpark-style block drafter for it."""


def checkpoint(name: str = TARGET) -> Path:
    """The folder of a shipped checkpoint: ``config.json``, ``model.safetensors``.

    Raises:
        ConfigError: it is not there; a wheel leaves the examples out.
    """
    folder = Path(pcp_passes.__file__).resolve().parents[1] / "examples" / "checkpoints" / name
    if not (folder / "model.safetensors").is_file():
        raise ConfigError(
            f"no checkpoint {name!r} in {folder.parent}: an installed wheel has none. "
            "Next: run from a clone of the repository, installed with pip install -e ."
        )
    return folder
