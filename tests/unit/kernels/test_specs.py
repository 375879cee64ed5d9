# SPDX-License-Identifier: Apache-2.0
"""Specs of kernels: what is refused and how, names, the way to JSON and back, which implementation runs."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
import torch

from pcp_kernels import catalog, device, specs
from pcp_kernels.generate import GENERATORS, generate
from pcp_kernels.specs import FAMILIES, KernelSpec, UnsupportedSpec, from_json

pytestmark = pytest.mark.unit

SHIPPED = list(catalog.shipped().values())


@pytest.mark.parametrize(
    "family, values, named",
    [
        ("topk", {"heads": 32, "store": "int8"}, "store: found 'int8'; supported: fp8, bf16, fp16, fp32"),
        ("topk", {"heads": 24}, "heads: found 24; supported: 2, 4, 8, 16, 32, 64"),
        ("topk", {"heads": 32, "dim": 96}, "dim: found 96; supported: 32, 64, 128"),
        ("topk", {"heads": 32, "page": 48}, "page: found 48; supported: 16, 32, 64, 128"),
        ("topk", {"heads": 32, "topk": 8}, "topk: found 8; supported: multiples of 16 from 16 to 2048"),
        ("topk", {"heads": 32, "topk": 2064}, "topk: found 2064; supported"),
        ("topk", {"heads": 32, "topk": 100}, "topk: found 100; supported"),
        ("topk", {"heads": 32, "layout": "ragged"}, "layout: found 'ragged'; supported: paged, contiguous"),
        ("topk", {"heads": 32, "capacity": 2048}, "capacity: found 2048; supported: at least 3072"),
        ("select", {"topk": True}, "topk: found True; supported"),
        ("scatter", {"page": 0}, "page: found 0; supported: 16, 32, 64, 128"),
        ("pack", {"rope": "neox"}, "rope: found 'neox'; supported: interleaved, half, none"),
        ("pack", {"rope": "none"}, "rope_dim: found 64 with rope='none'; supported: 0"),
        ("pack", {"dim": 32}, "rope_dim: found 64; supported: at most dim=32"),
        ("pack", {"source": "fp8"}, "source: found 'fp8'; supported: bf16, fp16, fp32"),
        ("pack", {"rounding": "fp16"}, "rounding: found 'fp16'; supported: bf16, fp32"),
        ("pack", {"norm": "yes"}, "norm: found 'yes'; supported: True, False"),
        ("mla", {"block_heads": 32}, "block_heads: found 32; supported: 16"),
        ("mla", {"latent": 500}, "latent: found 500; supported: 16, 32, 64, 128, 256, 512"),
        ("remap", {"warps": 3}, "warps: found 3; supported: 1, 2, 4, 8, 16"),
    ],
)
def test_what_is_not_supported_is_refused_with_what_is(family: str, values: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedSpec, match=re.escape(named)):
        FAMILIES[family](**values)


def test_every_fault_is_named() -> None:
    with pytest.raises(UnsupportedSpec) as refused:
        specs.TopKSpec(heads=7, dim=100, store="int4", page=65, topk=5000)
    assert [line.split(":")[0].strip() for line in str(refused.value).splitlines()[1:]] == [
        "heads", "dim", "store", "page", "topk", "capacity",
    ]  # fmt: skip


@pytest.mark.parametrize("spec", SHIPPED, ids=lambda spec: spec.name)
def test_json_and_back(spec: KernelSpec) -> None:
    data = json.loads(json.dumps(spec.to_json()))
    assert from_json(data) == spec
    with pytest.raises(UnsupportedSpec, match="not a spec of family"):
        from_json({**data, "ranks": 4})


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedSpec, match=r"no kernel family 'sort'; supported: pack, .*mla, paged"):
        from_json({"family": "sort"})


@pytest.mark.parametrize("spec", SHIPPED, ids=lambda spec: spec.name)
def test_the_digest_changes_with_everything_that_decides_the_text(spec: KernelSpec) -> None:
    digests = {
        spec.digest("3.9.0", "g"),
        spec.digest("3.8.0", "g"),
        spec.digest("3.9.0", "h"),
        spec.digest("3.9.0", "g", interpret=True),
        dataclasses.replace(spec, warps=spec.warps // 2).digest("3.9.0", "g"),
    }
    assert len(digests) == 5
    assert spec.digest("3.9.0", "g") == from_json(spec.to_json()).digest("3.9.0", "g")


def test_no_spec_knows_ranks_or_lengths() -> None:
    known = {field.name for cls in FAMILIES.values() for field in dataclasses.fields(cls)}
    assert known == {
        "warps", "stages", "dim", "rope", "rope_dim", "norm", "hadamard", "rounding", "store", "source", "latent",
        "page", "heads", "layout", "block_keys", "block_queries", "block_heads", "block", "inner", "capacity", "topk",
        "count", "head_dim", "value_dim", "records", "sinks", "slopes", "softcap",
    }  # fmt: skip


def test_names_say_what_differs_in_the_result_and_nothing_else() -> None:
    spec = catalog.topk(heads=32, topk=2048, arch=90)
    assert spec.name == "topk_h32_d128_fp8_paged64_k2048"
    assert catalog.topk(heads=32, topk=2048, arch=80).name == spec.name
    variants = [{"store": "bf16"}, {"page": 32}, {"layout": "contiguous"}, {"dim": 64}, {"heads": 64}, {"topk": 512}]
    names = {dataclasses.replace(spec, **variant).name for variant in variants}
    assert len(names | {spec.name}) == len(variants) + 1


def test_every_family_has_a_generator_and_a_summary() -> None:
    assert set(GENERATORS) == set(FAMILIES)
    assert all(cls.summary for cls in FAMILIES.values())


def test_what_a_spec_lacks_is_absent_from_its_text() -> None:
    with_all = generate(specs.PackSpec(hadamard=True))
    without = generate(specs.PackSpec(rope="none", rope_dim=0, norm=False, store="bf16"))
    for word in ("cos_ptr", "weight_ptr"):
        assert word in with_all and word not in without
    assert "scale_ptr" not in generate(catalog.topk(heads=32, topk=512, arch=90, store="bf16"))
    assert "table_ptr" not in generate(catalog.topk(heads=32, topk=512, arch=90, layout="contiguous"))


class TestDevice:
    def test_cpu_is_the_reference_unless_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("PCP_KERNELS", raising=False)
        assert device.implementation(torch.zeros(1)) == "reference"
        monkeypatch.setenv("PCP_KERNELS", "reference")
        assert device.implementation(torch.zeros(1)) == "reference"
        monkeypatch.setenv("PCP_KERNELS", "interpreter")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert device.implementation(torch.zeros(1)) == "interpreter"

    @pytest.mark.parametrize(
        "chosen, interpret, named",
        [
            ("triton", "", "PCP_KERNELS: found 'triton'; supported: reference, interpreter"),
            ("interpreter", "0", "PCP_KERNELS=interpreter: found TRITON_INTERPRET='0'; required: '1'"),
        ],
    )
    def test_wrong_settings_are_refused(
        self, monkeypatch: pytest.MonkeyPatch, chosen: str, interpret: str, named: str
    ) -> None:
        monkeypatch.setenv("PCP_KERNELS", chosen)
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        with pytest.raises(ValueError, match=re.escape(named)):
            device.implementation(torch.zeros(1))

    def test_other_devices_are_refused(self) -> None:
        with pytest.raises(ValueError, match="no kernel runs on meta; supported: cpu, cuda"):
            device.implementation(torch.zeros(1, device="meta"))
