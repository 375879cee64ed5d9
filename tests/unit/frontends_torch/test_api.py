# SPDX-License-Identifier: Apache-2.0
"""The names that the package itself offers."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import pcp_passes
from pcp_passes.errors import ConfigError
from tests.unit.frontends_torch.decoders import HIDDEN, decoder, tokens


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys, pcp_passes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(AttributeError, match="has no attribute 'absent'"):
        _ = pcp_passes.absent


def test_simulate_a_model() -> None:
    model = decoder()
    for inputs in ({"input_ids": tokens(33)}, {"input_ids": tokens(33), "position_ids": torch.arange(33)[None]}):
        found = pcp_passes.simulate_model(model, inputs, pcp=4)["logits"]
        torch.testing.assert_close(found, model(**inputs)["logits"], rtol=0, atol=2e-5)
    found = pcp_passes.simulate_model(model, (tokens(33),), pcp=4, tokens={"input_ids": 1})["logits"]
    torch.testing.assert_close(found, model(tokens(33))["logits"], rtol=0, atol=2e-5)


def test_inspect_a_model() -> None:
    report = pcp_passes.inspect_model(decoder(), {"input_ids": tokens(48)}, pcp=4)
    assert (report.pcp, report.tokens, report.rows) == (4, 48, 12)
    # K and V of each of two layers, and the logits.
    assert sum(c.bytes for c in report.collectives) == report.sent == 4 * 12 * (2 * 2 * HIDDEN + 61)
    plain = json.loads(json.dumps(report.to_json()))
    assert plain["sent"] == report.sent and "pcp.all_gather_rows" in plain["graph"] and not plain["replicated"]
    text = "\n".join(report.lines())
    assert "4 ranks, 48 tokens, 12 rows a rank" in text and f"{report.sent} bytes sent" in text
    assert "localize-attention: 2" in text


def test_inspect_on_the_meta_device_and_without_running() -> None:
    model = decoder().to("meta")
    report = pcp_passes.inspect_model(model, {"input_ids": tokens(48).to("meta")}, pcp=4, balance=0.01)
    assert report.sent == pcp_passes.inspect_model(decoder(), {"input_ids": tokens(48)}, pcp=4, balance=0.01).sent > 0


def test_inspect_a_model_that_runs_whole() -> None:
    report = pcp_passes.inspect_model(decoder(), {"input_ids": tokens(1)}, pcp=4)
    assert report.replicated == ("one token",) and report.rewritten is None and report.sent == 0
    assert "replicated on every rank: one token" in "\n".join(report.lines())
    assert report.to_json()["graph"] is None


def test_what_a_wrong_call_is_told() -> None:
    with pytest.raises(ConfigError, match="needs to know the token dimension"):
        pcp_passes.simulate_model(decoder(), (tokens(12),), pcp=2)
    with pytest.raises(ConfigError, match="pcp is the number of ranks, an integer of at least 1; found 0"):
        pcp_passes.inspect_model(decoder(), {"input_ids": tokens(12)}, pcp=0)
    with pytest.raises(ConfigError, match='outputs="local" differs between ranks'):
        pcp_passes.simulate_model(decoder(), {"input_ids": tokens(12)}, pcp=2, outputs="local")
