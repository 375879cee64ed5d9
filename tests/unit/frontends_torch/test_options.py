# SPDX-License-Identifier: Apache-2.0
"""Options of the PyTorch front end: what is accepted, and what a wrong one says."""

from __future__ import annotations

from typing import Any

import pytest

from pcp_passes.errors import ConfigError
from pcp_passes.frontends.torch.options import TorchOptions


def test_defaults() -> None:
    assert TorchOptions.parse(None) == TorchOptions.parse({}) == TorchOptions()


def test_everything_is_accepted_once() -> None:
    asked = {
        "layout": "contiguous", "outputs": "last", "inner": "eager", "unknown": "replicate",
        "tokens": {"input_ids": 1}, "replicate": ["model.head"], "verify": "every", "dump": "out", "axis": "cp",
        "agreement_s": 5, "balance": 3,
    }  # fmt: skip
    options = TorchOptions.parse(asked)
    assert options.replicate == ("model.head",) and options.agreement_s == 5.0
    for key, value in asked.items():
        assert TorchOptions.parse({key: value}) != TorchOptions()


@pytest.mark.parametrize(
    "key, value, said",
    [
        ("layuot", "zigzag", "unknown option 'layuot'.*Did you mean 'layout'"),
        ("layout", "zigzga", "unknown layout 'zigzga'.*Did you mean 'zigzag'"),
        ("layout", "interleave", "accepted: 'zigzag', 'contiguous'"),
        ("outputs", "all", "unknown outputs 'all'"),
        ("inner", "tvm", "unknown inner 'tvm'"),
        ("unknown", "ignore", "unknown unknown 'ignore'"),
        ("verify", True, "unknown verify True"),
        ("tokens", ["input_ids"], "tokens must map argument names to dimensions"),
        ("tokens", {"input_ids": "1"}, "found 'input_ids': '1'"),
        ("tokens", {"input_ids": True}, "found 'input_ids': True"),
        ("tokens", {0: 1}, "found 0: 1"),
        ("replicate", "model.head", "replicate must list module paths"),
        ("replicate", [1], "replicate must list module paths"),
        ("dump", 3, "dump must be a name or None, found 3"),
        ("axis", "", "axis must be a name or None, found ''"),
        ("balance", 0, "balance must be a number of operations per byte"),
        ("balance", float("nan"), "found nan"),
        ("agreement_s", 0, "agreement_s must be a number of seconds from 1 to 3600"),
        ("agreement_s", True, "found True"),
    ],
)
def test_what_is_refused(key: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TorchOptions.parse({key: value})


def test_the_digest_tells_what_must_agree() -> None:
    base = TorchOptions.parse({"tokens": {"a": 1}})
    assert base.digest() == TorchOptions.parse({"tokens": {"a": 1}, "dump": "here"}).digest()
    others = [{"tokens": {"a": 0}}, {"tokens": {"a": 1}, "layout": "contiguous"}, {"tokens": {"a": 1}, "axis": "x"}]
    assert len({base.digest(), *(TorchOptions.parse(other).digest() for other in others)}) == 4
