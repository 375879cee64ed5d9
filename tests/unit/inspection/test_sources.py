# SPDX-License-Identifier: Apache-2.0
"""Configurations: shipped ones, files, folders, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pcp_passes.errors import ConfigError
from pcp_passes.inspection.sources import load_config, shipped
from tests.unit.inspection.configs import LLAMA


def test_the_shipped_configurations_are_those_that_are_promised() -> None:
    assert shipped() == ("deepseek-v3.2", "glm-5.2", "llama-405b", "qwen3-235b")
    for name in shipped():
        config = load_config(name.upper())
        assert not any(key.startswith("_") for key in config), "a remark is not an option"


def test_a_folder_and_a_file_are_read_alike(tmp_path: Path) -> None:
    extra = {"quantization_config": {"quant_method": "fp8"}, "auto_map": {"AutoModel": "x.py"}, "_name": "y"}
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **extra}))
    assert load_config(str(tmp_path)) == load_config(str(tmp_path / "config.json")) == LLAMA


@pytest.mark.parametrize(
    "text, told",
    [
        ("{", "as JSON"),
        ("[1]", "names no model_type"),
        ('{"model_type": 3}', "names no model_type"),
        ("\xff", "as JSON"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=told):
        load_config(str(tmp_path))


def test_an_unknown_name_says_which_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"shipped are deepseek-v3.2, glm-5.2.*Did you mean 'glm-5.2'"):
        load_config("glm-5")
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        load_config(str(tmp_path))
