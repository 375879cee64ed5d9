# SPDX-License-Identifier: Apache-2.0
"""Attention over paged caches: the reference against explicit masks, the kernel in the interpreter against it.

In float64 the reference is within 2e-15 of the explicit form, and every planted fault is off by 1e-2 or more. The
kernel sums in another order: measured on outputs up to 3, it is off by 2e-6 in fp32, and by one unit of what is stored
in fp16 and bf16 (2e-3 over records); every spoilt kernel is off by more than 0.8 in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from pcp_kernels import catalog, ops, specs
from pcp_kernels.generate import generate
from pcp_kernels.reference import paged as reference
from pcp_kernels.reference.pack import latent_pack, latent_unpack
from tests.interpreted import Interpreted
from tests.kernel_calls import call, call_spoilt

pytestmark = pytest.mark.unit

ATOL = {torch.float64: 1e-13, torch.float32: 6e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
BLOCKS, COLUMNS, REQUESTS = 12, 3, 3


@dataclass(frozen=True)
class Case:
    """Rows of three requests over shuffled blocks; what no row may see is NaN, what no key needs is no block at all.

    Rows: two of request 0, one that sees nothing, one of request 2 from the middle, two of request 1, padding.
    """

    dtype: torch.dtype = torch.float64
    heads: int = 6
    kv_heads: int = 2
    dim: int = 16
    rope: int = 0
    value: int = 16
    page: int = 16
    store: torch.dtype | None = None
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    seed: int = 0

    LENGTHS = (37, 20, 48)

    @property
    def operands(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        store = self.store or self.dtype
        columns = COLUMNS * 16 // self.page
        blocks = REQUESTS * columns + 2
        tables = torch.randperm(blocks, generator=generator)[: REQUESTS * columns].view(REQUESTS, columns).int()
        seen = torch.zeros(blocks, self.page, dtype=torch.bool)
        for request, keys in enumerate(self.LENGTHS):
            place = torch.arange(keys)
            seen[tables[request, place // self.page].long(), place % self.page] = True
            tables[request, -(-keys // self.page) :] = -1 if request else 2**31 - 1

        def cache(width: int) -> torch.Tensor:
            held = normal(blocks, self.page, self.kv_heads, width).to(store)
            if store.itemsize > 1:
                held[~seen] = float("nan")
            return held

        q = normal(7, self.heads, self.dim + self.rope).to(self.dtype)
        rope = cache(self.rope) if self.rope else None
        caches = cache(self.dim), rope, cache(self.value) if self.value else None
        low = torch.tensor([0, 3, 5, 17, 0, 16, 0], dtype=torch.int32)
        high = torch.tensor([36, 37, 5, 48, 17, 20, 0], dtype=torch.int32)
        row_request = torch.tensor([0, 0, 1, 2, 1, 1, 2], dtype=torch.int32)
        options = {
            "scale": 0.3,
            "softcap": self.softcap,
            "sinks": normal(self.heads).to(self.dtype) if self.sinks else None,
            "slopes": normal(self.heads).to(self.dtype) if self.slopes else None,
        }
        return (q, *caches, tables, row_request, low, high, high.long() - 1), options


def exact(args: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
    """Row by row and head by head over the keys that a row may see, in float64."""
    q, k, rope, v, tables, row_request, low, high, positions = args
    page, groups = k.shape[1], q.shape[1] // k.shape[2]
    out = torch.zeros(*q.shape[:2], (k if v is None else v).shape[3], dtype=torch.float64)
    for row in range(len(q)):
        place = torch.arange(int(low[row]), int(high[row]))
        if not len(place):
            continue
        at = tables[row_request[row], place // page].long(), place % page
        for head in range(q.shape[1]):
            key, value = (x[at][:, head // groups].double() for x in (k, k if v is None else v))
            if rope is not None:
                key = torch.cat([key, rope[at][:, head // groups].double()], dim=1)
            logits = key @ q[row, head].double() * options["scale"]
            if options["softcap"]:
                logits = options["softcap"] * torch.tanh(logits / options["softcap"])
            if options["slopes"] is not None:
                logits = logits + options["slopes"][head].double() * (place - positions[row])
            sink = logits[:0] if options["sinks"] is None else options["sinks"][head, None].double()
            out[row, head] = torch.cat([logits, sink]).softmax(0)[: len(place)] @ value
    return out


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found.double(), wanted.double(), rtol=0, atol=ATOL[found.dtype])


FEATURES = {
    "plain": Case(),
    "one query head a key head": Case(heads=2),
    "small pages": Case(page=4),
    "values of another width": Case(value=24),
    "key is value": Case(kv_heads=1, value=0, rope=8, dim=32),
    "rope part": Case(value=0, rope=8),
    "softcap": Case(softcap=1.5),
    "sinks": Case(sinks=True),
    "slopes": Case(slopes=True),
    "all": Case(softcap=1.5, sinks=True, slopes=True),
}


class TestReference:
    @pytest.mark.parametrize("name", FEATURES)
    def test_equals_the_explicit_form(self, name: str) -> None:
        args, options = FEATURES[name].operands
        found = reference.paged_attend_rows(*args, **options)
        assert close(found, exact(args, options))
        assert bool((found[[2, 6]] == 0).all()) and bool(found[[0, 1, 3, 4, 5]].any(-1).all())

    @pytest.mark.parametrize("name, change", [("softcap", {"softcap": 0.0}), ("sinks", {"sinks": None}),
                                              ("slopes", {"slopes": None}), ("plain", {"scale": 0.2})])  # fmt: skip
    def test_a_feature_left_out_differs(self, name: str, change: dict[str, Any]) -> None:
        args, options = FEATURES[name].operands
        found = reference.paged_attend_rows(*args, **{**options, **change})
        assert (found - exact(args, options)).abs().max() > 1e-2

    @pytest.mark.parametrize("place, wrong", [(6, -1), (7, 1), (5, 1)])
    def test_other_bounds_or_another_request_differ(self, place: int, wrong: int) -> None:
        args, options = Case(page=4).operands
        changed = list(args)
        changed[place] = (args[place] + wrong).clamp(min=0)
        if place == 5:
            changed[place] = changed[place] % REQUESTS
        found = reference.paged_attend_rows(*changed, **options)
        assert not close(found, exact(args, options))

    @pytest.mark.parametrize("workspace", [0, 40_000, 1 << 20])
    def test_the_workspace_bounds_the_steps_and_leaves_the_result(self, workspace: int) -> None:
        args, options = FEATURES["all"].operands
        found = reference.paged_attend_rows(*args, **options, workspace_bytes=workspace)
        assert close(found, exact(args, options))

    def test_a_row_does_not_depend_on_the_others(self) -> None:
        args, options = Case(torch.float32).operands
        whole = reference.paged_attend_rows(*args, **options)
        other = torch.arange(7) != 3
        q, high = torch.where(other[:, None, None], float("inf"), args[0]), torch.where(other, 48, args[7])
        changed = q, *args[1:7], high.int(), args[8]
        assert torch.equal(reference.paged_attend_rows(*changed, **options)[3], whole[3])
        alone = args[0][3:4], *args[1:5], *(x[3:4] for x in args[5:])
        assert close(reference.paged_attend_rows(*alone, **options), whole[3:4])

    def test_a_request_is_cut_at_the_end_of_its_table(self) -> None:
        args, options = Case().operands
        longer = (*args[:7], torch.where(args[7] == 48, 1000, args[7]), args[8])
        assert torch.equal(
            reference.paged_attend_rows(*longer, **options), reference.paged_attend_rows(*args, **options)
        )

    def test_fp8_rows_are_cast(self) -> None:
        args, options = Case(torch.bfloat16, store=torch.float8_e4m3fn).operands
        assert close(reference.paged_attend_rows(*args, **options), exact(args, options))

    @pytest.mark.parametrize("empty", ["rows", "requests", "columns"])
    def test_nothing_to_do(self, empty: str) -> None:
        (q, k, rope, v, tables, *rows), options = Case().operands
        if empty == "rows":
            q, rows = q[:0], [x[:0] for x in rows]
        else:
            tables = tables[:0] if empty == "requests" else tables[:, :0]
        found = reference.paged_attend_rows(q, k, rope, v, tables, *rows, **options)
        assert found.shape == (len(q), 6, 16) and not found.any()


def records(latent: int, rope: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Operands over FP8 records whose rows have scales of their own; queries of 20 heads in bf16."""
    (q, k, turn, _, *rows), _ = Case(torch.bfloat16, 20, 1, latent, rope, 0).operands
    size = torch.exp2(torch.randint(-3, 3, (*k.shape[:2], 1, 1), generator=torch.Generator().manual_seed(4)).float())
    held = latent_pack((k.float() * size).nan_to_num().bfloat16().flatten(0, 2), turn.nan_to_num().flatten(0, 2))
    args = q, held.view(*k.shape[:2], -1), *rows[:-1]
    return args, {"latent_dim": latent, "rope_dim": rope, "scale": 0.05}


def test_records_are_read_as_they_were_packed() -> None:
    args, options = records(64, 8)
    q, held, *rows = args
    latent, turn = latent_unpack(held, 64, 8, torch.float64)
    plain = q.double(), latent[:, :, None], turn[:, :, None], None, *rows, rows[3].long()
    wanted = exact(plain, {"scale": 0.05, "softcap": 0.0, "sinks": None, "slopes": None})
    assert close(reference.paged_attend_records(*args, **options), wanted)
    swapped = q.flip(1), held, *rows
    assert not close(reference.paged_attend_records(*swapped, **options), wanted)


class TestKernel:
    @pytest.mark.parametrize(
        "case",
        [
            Case(torch.float32),
            Case(torch.bfloat16, heads=8, kv_heads=1, dim=48, value=32),
            Case(torch.float16, heads=5, kv_heads=5),
            Case(torch.float32, heads=34, kv_heads=2, sinks=True, slopes=True, softcap=1.5),
            Case(torch.float32, heads=20, kv_heads=1, dim=32, rope=8, value=0),
            Case(torch.bfloat16, store=torch.float8_e4m3fn, dim=24, value=24),
        ],
        ids=["fp32", "bf16", "fp16", "every feature, three tiles of heads", "absorbed", "fp8"],
    )
    def test_the_kernel_is_the_reference(self, interpreted: Interpreted, case: Case) -> None:
        args, options = case.operands
        found = interpreted(call, "paged_attend_rows", args, options)
        assert found.dtype == case.dtype
        assert close(found, reference.paged_attend_rows(*args, **options))
        assert not found[[2, 6]].any()

    @pytest.mark.parametrize("latent, rope", [(256, 16), (64, 8)])
    def test_over_records(self, interpreted: Interpreted, latent: int, rope: int) -> None:
        args, options = records(latent, rope)
        found = interpreted(call, "paged_attend_records", args, options)
        assert close(found, reference.paged_attend_records(*args, **options))
        assert not found[[2, 6]].any()

    def test_a_row_does_not_depend_on_the_others(self, interpreted: Interpreted) -> None:
        args, options = Case(torch.float32).operands
        whole = interpreted(call, "paged_attend_rows", args, options)
        alone = args[0][3:4], *args[1:5], *(x[3:4] for x in args[5:])
        assert torch.equal(interpreted(call, "paged_attend_rows", alone, options), whole[3:4])

    def test_strided_caches_are_read_where_they_lie(self, interpreted: Interpreted) -> None:
        """Latent and rope key as columns of one cache."""
        args, options = Case(torch.float32, kv_heads=1, dim=32, rope=8, value=0).operands
        joined = torch.cat([args[1], args[2]], dim=3)
        parts = joined.split([32, 8], dim=3)
        found = interpreted(call, "paged_attend_rows", (args[0], *parts, *args[3:]), options)
        assert torch.equal(found, interpreted(call, "paged_attend_rows", args, options))


SPOILT: dict[str, dict[str, str]] = {
    "sees one key less": {"place < high": "place < high - 1"},
    "sees keys before low": {"(place >= low) & (place < high)": "place < high"},
    "reads blocks in order": {"slot = block * 16": "slot = (place // 16) * 16"},
    "request 0 for all": {"tl.load(request_ptr + row)": "(tl.load(request_ptr + row) * 0)"},
    "key head 0 for all": {"k_ptr += kv_head * k_head_stride": "k_ptr += 0 * k_head_stride"},
    "values of key head 0": {"v_ptr += kv_head * v_head_stride": "v_ptr += 0 * v_head_stride"},
    "no softmax scale": {"scores * softmax_scale": "scores"},
    "sums are not rescaled": {"sums * fade[:, None]": "sums"},
    "total is not rescaled": {"total * fade": "total"},
    "rows without keys": {"tl.where(total > 0.0, total, 1.0)": "total"},
    "heads of the first tile": {"tl.program_id(2).to(tl.int64) * HEADS": "0"},
    "no sinks": {"tl.exp(sink - best)": "0.0"},
    "no soft cap": {"scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)": "scores += 0.0 * cap"},
    "no slopes": {"scores += slope": "scores += 0.0 * slope"},
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_kernel_differs(interpreted: Interpreted, name: str) -> None:
    case = Case(torch.float32, heads=34, sinks=True, slopes=True, softcap=1.5)
    args, options = case.operands
    found = interpreted(call_spoilt, SPOILT[name], "paged_attend_rows", args, options)
    wanted = reference.paged_attend_rows(*args, **options)
    assert not torch.allclose(found, wanted, rtol=0, atol=2e-2)


@pytest.mark.parametrize("edit", ["* scale[:, :, None]", "+ group[None, :]"])
def test_spoilt_scales_of_records_differ(interpreted: Interpreted, edit: str) -> None:
    args, options = records(256, 16)
    new = "* (0.0 * scale[:, :, None] + 1.0)" if "scale" in edit else "+ 1 - group[None, :]"
    found = interpreted(call_spoilt, {edit: new}, "paged_attend_records", args, options)
    assert not close(found, reference.paged_attend_records(*args, **options))


class TestOperator:
    def test_registered_as_it_behaves(self) -> None:
        args, options = FEATURES["all"].operands
        given = (*args, *(options[name] for name in ("scale", "softcap", "sinks", "slopes")), 1 << 20)
        torch.library.opcheck(torch.ops.pcp_kernels.paged_attend_rows.default, given)
        args, options = records(64, 8)
        given = (*args, options["latent_dim"], options["rope_dim"], options["scale"], 1 << 20)
        torch.library.opcheck(torch.ops.pcp_kernels.paged_attend_records.default, given)

    def test_every_fault_is_named(self) -> None:
        (q, k, rope, v, tables, request, low, high, at), options = Case().operands
        with pytest.raises(ValueError, match="paged_attend_rows cannot run") as refused:
            ops.paged_attend_rows(
                q[:, :5], k, rope, v[..., None], tables.long(), request[:3], low, high.long(), at, **options
            )
        message = str(refused.value)
        for named in ("q: found 5 heads over 2 of keys", "v: found", "tables: found", "row_request: found", "high: f"):
            assert named in message, message

    @pytest.mark.parametrize(
        "case, why",
        [
            (Case(torch.float32, dim=40, value=40), "no kernel for this head size"),
            (Case(torch.float32, page=4), "no kernel for this page"),
            (Case(torch.float32, store=torch.bfloat16), "no kernel that widens bf16"),
        ],
        ids=lambda given: given if isinstance(given, str) else "",
    )
    def test_sizes_without_a_kernel_run_the_reference(self, interpreted: Interpreted, case: Case, why: str) -> None:
        args, options = case.operands
        found = interpreted(call, "paged_attend_rows", args, options)
        assert torch.equal(found, reference.paged_attend_rows(*args, **options)), why


def test_what_a_spec_lacks_is_absent_from_its_text() -> None:
    words = {"sink_ptr": "sinks", "slope_ptr": "slopes", "position_ptr": "slopes", "cap": "softcap"}
    full = generate(specs.PagedSpec(sinks=True, slopes=True, softcap=True))
    for word, field in words.items():
        assert word in full
        without = generate(replace(specs.PagedSpec(sinks=True, slopes=True, softcap=True), **{field: False}))
        assert f"{word}" not in without.split("def kernel")[1].replace("capacity", ""), word
    shared = generate(catalog.paged(arch=90, head_dim=64, value_dim=0))
    assert "v_ptr" not in shared and "rope_ptr" not in shared
    assert "scale_ptr" in generate(catalog.paged(arch=90, head_dim=64, value_dim=0, store="fp8", records=True))


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"head_dim": 100}, "head_dim: found 100; supported: 8, 16"),
        ({"rope_dim": 8}, "value_dim: found 128 with rope_dim=8; supported: 0"),
        ({"store": "fp16"}, "store: found 'fp16' with source='bf16'; supported: 'fp8', or the source"),
        ({"records": True}, "records: found True; supported with store='fp8'"),
    ],
)
def test_specs_without_a_kernel_are_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(specs.UnsupportedSpec, match=named):
        specs.PagedSpec(**fields)
