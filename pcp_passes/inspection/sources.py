# SPDX-License-Identifier: Apache-2.0
"""Where a model's configuration comes from: a shipped one by name, or a ``config.json``. Nothing is downloaded."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pcp_passes.errors import ConfigError

_SHIPPED = Path(__file__).parent / "configs"

_NOT_ARCHITECTURE = ("quantization_config", "auto_map", "compression_config")
"""Entries of a published configuration that say how weights are stored, or name code: neither is used here."""


def shipped() -> tuple[str, ...]:
    """Names of the configurations that come with the package."""
    return tuple(sorted(path.stem for path in _SHIPPED.glob("*.json")))


def load_config(model: str) -> dict[str, Any]:
    """The configuration of ``model`` as a dictionary, without what does not describe the architecture.

    Args:
        model: a shipped name, a folder with ``config.json``, or a JSON file.

    Raises:
        ConfigError: there is no such name or file, or the file is not a model's configuration.
    """
    path = _find(model)
    try:
        found = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"cannot read {path} as JSON: {error}. Required: a model's config.json.") from error
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise ConfigError(f"{path} names no model_type; required a config.json in the format of transformers.")
    return {key: held for key, held in found.items() if not key.startswith("_") and key not in _NOT_ARCHITECTURE}


def _find(model: str) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ConfigError(f"{model} holds no config.json. Give the folder of a model, or the file itself.")
        return path
    if path.is_file():
        return path
    name = model.lower()
    if name in shipped():
        return _SHIPPED / f"{name}.json"
    near = get_close_matches(name, shipped(), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"no file, folder or shipped configuration is called {model!r}; shipped are {', '.join(shipped())}.{hint} "
        "For another model, give the folder that holds its config.json."
    )
