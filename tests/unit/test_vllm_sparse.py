# SPDX-License-Identifier: Apache-2.0
"""Sparse attention in vLLM without vLLM: the ops on layers made here, their rules, and rows of literal steps."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pcp_kernels.ops import index_pack, index_prep
from pcp_passes.errors import ConfigError, PcpError
from pcp_passes.frontends.vllm import plugin
from pcp_passes.frontends.vllm import runtime as runtimes
from pcp_passes.frontends.vllm.sparse import ops, rules
from pcp_passes.frontends.vllm.sparse.rows import StepRows, rotated, step_rows
from pcp_passes.ir import rules as table
from pcp_passes.options import PcpOptions
from pcp_passes.passes import PassContext, build_variants
from pcp_passes.passes.observers import VerifyObserver
from tests import toy_runs

pytestmark = pytest.mark.unit
HEADS, NOPE, ROPE, LATENT, VALUE = 2, 6, 4, 8, 5
INDEX_HEADS, DIM, PAGE, BLOCKS, TOPK = 2, 32, 4, 16, 3
TABLE = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(0)).int().view(2, 8)


# -- whose the rows are ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "starts, lengths, rows, requests, visible",
    [
        # Seven tokens on two ranks: A B and G on one, C D and E F on the other, each with a padded row.
        ([0, 2, 3], [2, 7], 4, [0, 0, 1, 1], [1, 2, 7, 0]),
        ([0, 2, 4], [4, 6], 4, [0, 0, 1, 1], [3, 4, 5, 6]),
        # Verification of three, one and four tokens beside a request that has none.
        ([0, 3, 4, 8, 8], [10, 7, 12, 0], 8, [0, 0, 0, 1, 2, 2, 2, 2], [8, 9, 10, 7, 9, 10, 11, 12]),
        # A rank without a token.
        ([0, 0], [0], 2, [0, 0], [0, 0]),
    ],
)
def test_rows_of_a_step(starts, lengths, rows, requests, visible) -> None:
    found = step_rows(torch.tensor(starts), torch.tensor(lengths), rows, torch.zeros(len(lengths), 1).int())
    assert found.row_request.tolist() == requests and found.row_request.dtype == torch.int32
    assert found.visible.tolist() == visible and found.visible.dtype == torch.int32
    more_requests, more_visible = found.padded(rows + 2)
    assert more_visible.tolist() == [*visible, 0, 0] and more_requests[:rows].tolist() == requests


class Rotary:
    """As vLLM's layer where custom ops are on: what a call reaches is wrong."""

    def forward_native(self, positions, q, k):
        return q * positions[:, None, None], k * positions[:, None, None]

    def __call__(self, positions, q, k):
        return q.zero_(), k.zero_()


def test_rotation_is_never_that_of_the_cpu_kernel() -> None:
    positions, q = torch.tensor([2, 3]), torch.ones(2, 3, 4)
    turned, key = rotated(Rotary(), positions, q, torch.ones(2, 1, 4))
    assert turned[:, 0, 0].tolist() == [2, 3] and key[:, 0, 0].tolist() == [2, 3] and q.all()


def test_the_layer_turns_nothing_by_calling_a_rotary_layer() -> None:
    tree = ast.parse((Path(ops.__file__).parent / "layer.py").read_text())
    calls = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    turns = [call for call in calls if "rotary_emb" in call or "rope_emb" in call]
    assert len(turns) == 2 and all(call.startswith("rotated(") for call in turns)


# -- the ops -----------------------------------------------------------------------------------------------


def _context(monkeypatch: pytest.MonkeyPatch, metadata, slots) -> None:
    held = SimpleNamespace(attn_metadata=metadata, slot_mapping=slots, no_compile_layers={"attn": "layer"})
    module = SimpleNamespace(get_forward_context=lambda: held)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(forward_context=module))
    monkeypatch.setitem(sys.modules, "vllm.forward_context", module)


@pytest.mark.parametrize(
    "metadata, slots, found",
    [
        ({"attn": "step", "other": ""}, {"attn": "slots"}, ("layer", "slots", "step")),
        # A profile run, and a dummy run whose slots are of no step.
        (None, {}, ("layer", None, None)),
        (None, {"attn": "slots"}, ("layer", None, None)),
    ],
)
def test_what_a_forward_holds_for_a_layer(monkeypatch: pytest.MonkeyPatch, metadata, slots, found) -> None:
    _context(monkeypatch, metadata, slots)
    assert ops._layer_of("attn") == found


@pytest.mark.parametrize(
    "metadata, slots",
    [
        ({"other": ""}, {"attn": ""}),
        ({"attn": ""}, {"other": ""}),
        ({"attn": ""}, {}),
        ([{"attn": ""}, {"attn": ""}], [{"attn": ""}, {"attn": ""}]),  # two micro-batches
    ],
)
def test_a_layer_that_a_step_forgets_is_no_profile_run(monkeypatch: pytest.MonkeyPatch, metadata, slots) -> None:
    """Its keys would not be written, or it would attend to nothing, without a word."""
    _context(monkeypatch, metadata, slots)
    with pytest.raises(ConfigError, match=r"attn: found slots of .* required both of every layer"):
        ops._layer_of("attn")


@pytest.mark.parametrize("asked", [False, True])
def test_an_engine_that_asks_for_nothing_finds_no_runtime(monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    """Hooks stay in a process, so one of an earlier engine would rewrite or check it."""
    monkeypatch.setattr(runtimes, "_current", runtimes.Runtime(PcpOptions(mode="check"), 1, 0))
    started: list[object] = []
    monkeypatch.setattr(runtimes, "start", lambda options, config: started.append(config))
    config = SimpleNamespace(additional_config={"pcp_passes": {}} if asked else {})
    assert plugin._around_runner_init(lambda runner, given: (runner, given), "runner", config) == ("runner", config)
    assert started == ([config] if asked else [])
    assert asked or runtimes.current() is None


@dataclass
class World:
    """Layers, slots and rows that the ops find in place of vLLM's forward context."""

    store: str = "fp32"
    layout: str = "replicated"
    slots: torch.Tensor | None = None
    step: StepRows | None = None
    layers: dict[str, SimpleNamespace] = field(default_factory=dict)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        width = DIM + 4 if self.store == "fp8" else DIM
        keys = torch.zeros(BLOCKS, PAGE, width, dtype=torch.uint8 if self.store == "fp8" else torch.float32)
        pages = keys.view(BLOCKS, -1) if self.store == "fp8" else keys
        self.layers["index"] = SimpleNamespace(kv_cache=keys, index_pages=lambda: pages, page=PAGE)
        self.layers["attn"] = SimpleNamespace(
            kv_cache=torch.zeros(BLOCKS, PAGE, LATENT + ROPE),
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=ROPE,
            kv_lora_rank=LATENT,
            W_UK_T=torch.randn(HEADS, NOPE, LATENT, generator=generator),
            W_UV=torch.randn(HEADS, LATENT, VALUE, generator=generator),
            scale=0.3,
        )

    def layer_of(self, name: str) -> tuple[SimpleNamespace, torch.Tensor | None, StepRows | None]:
        return self.layers[name], self.slots, self.step


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch):
    def make(**given) -> World:
        made = World(**given)
        monkeypatch.setattr(ops, "_layer_of", made.layer_of)
        monkeypatch.setattr(ops, "_slot_layout", lambda: made.layout)
        return made

    return make


@dataclass(frozen=True)
class Tokens:
    """All tokens of two requests, in order; every row of the attention is drawn from them."""

    latent: torch.Tensor
    rope: torch.Tensor
    key: torch.Tensor
    q: torch.Tensor
    index_q: torch.Tensor
    weights: torch.Tensor
    slots: torch.Tensor
    lengths: tuple[int, int]

    @classmethod
    def drawn(cls, lengths: tuple[int, int] = (11, 6)) -> Tokens:
        count, generator = sum(lengths), torch.Generator().manual_seed(2)
        normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        at = [torch.arange(n) for n in lengths]
        slots = torch.cat([TABLE[r][a // PAGE].long() * PAGE + a % PAGE for r, a in enumerate(at)])
        # Whole numbers: ties, zeros, and sums that no order of adding changes.
        whole = lambda *shape: torch.randint(-2, 3, shape, generator=generator).float()  # noqa: E731
        return cls(
            normal(count, LATENT), normal(count, 1, ROPE), whole(count, DIM), normal(count, HEADS, NOPE + ROPE),
            whole(count, INDEX_HEADS, DIM), whole(count, INDEX_HEADS), slots, lengths,
        )  # fmt: skip

    def prepared(self, store: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if store == "fp8":
            return (*index_prep(self.index_q, self.weights, store=store), index_pack(self.key, store=store))
        return self.index_q, self.weights, self.key

    def attended(self, layer: SimpleNamespace) -> tuple[torch.Tensor, torch.Tensor]:
        """Selection and attention of every token by the definitions: expanded keys, one row at a time."""
        chosen = torch.full((len(self.slots), TOPK), -1, dtype=torch.int32)
        out = torch.zeros(len(self.slots), HEADS * VALUE)
        begin = 0
        for length in self.lengths:
            for i in range(length):
                row, past = begin + i, slice(begin, begin + i + 1)
                scores = (torch.relu(self.index_q[row] @ self.key[past].T) * self.weights[row][:, None]).sum(0)
                order = sorted(range(i + 1), key=lambda j: (-float(scores[j]), j))
                best = sorted(order[:TOPK])
                chosen[row, : len(best)] = torch.tensor(best, dtype=torch.int32)
                keys = self.latent[past][best]
                for head in range(HEADS):
                    nope = keys @ layer.W_UK_T[head].T
                    logits = nope @ self.q[row, head, :NOPE] + self.rope[past][best][:, 0] @ self.q[row, head, NOPE:]
                    weight = torch.softmax(logits * layer.scale, 0)
                    out[row, head * VALUE : (head + 1) * VALUE] = weight @ keys @ layer.W_UV[head]
            begin += length
        return chosen, out


def _run(tokens: Tokens, world: World, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, weights, key = tokens.prepared(world.store)
    dep = ops.record_write(tokens.latent, tokens.rope, key, "attn", "index", world.layout)
    indices = ops.index_topk(q[rows], weights[rows], dep, "index", TOPK)
    return indices, ops.sparse_attend(tokens.q[rows], indices, dep, "attn", VALUE)


@pytest.mark.parametrize("store", ["fp32", "fp8"])
def test_ops_compute_the_definitions(world, store: str) -> None:
    tokens = Tokens.drawn()
    step = step_rows(torch.tensor([0, 11, 17]), torch.tensor([11, 6]), 17, TABLE)
    made = world(store=store, slots=tokens.slots, step=step)
    indices, out = _run(tokens, made, torch.arange(17))
    wanted, attended = tokens.attended(made.layers["attn"])
    assert torch.equal(indices, wanted)  # small whole numbers are exact in fp8
    torch.testing.assert_close(out, attended, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("store", ["fp32", "fp8"])
def test_segments_of_two_ranks_give_the_rows_of_one(world, store: str) -> None:
    """Rows of all ranks are written, each rank reads its own segments; one padded row sees nothing and gives zeros."""
    tokens = Tokens.drawn()
    whole = world(store=store, slots=tokens.slots)
    whole.step = step_rows(torch.tensor([0, 11, 17]), torch.tensor([11, 6]), 17, TABLE)
    wanted, attended = _run(tokens, whole, torch.arange(17))
    # Chunks 0 and 3 of each request, of ceil(n / 4) tokens, then two padded rows.
    rows = torch.tensor([0, 1, 2, 9, 10, 11, 12, 0, 0])
    step = step_rows(torch.tensor([0, 3, 5, 7]), torch.tensor([3, 11, 2]), 9, TABLE[[0, 0, 1]])
    order = torch.randperm(17, generator=torch.Generator().manual_seed(3))
    gathered = Tokens(
        *(getattr(tokens, name)[order] for name in ("latent", "rope", "key")), tokens.q, tokens.index_q,
        tokens.weights, tokens.slots[order], tokens.lengths,
    )  # fmt: skip
    half = world(store=store, layout="rank_major", slots=gathered.slots, step=step)
    indices, out = _run(gathered, half, rows)
    assert torch.equal(indices[:7], wanted[rows[:7]]) and torch.equal(indices[7:], torch.full((2, TOPK), -1).int())
    torch.testing.assert_close(out[:7], attended[rows[:7]])
    assert not out[7:].any()


def test_slot_of_padding_is_skipped(world) -> None:
    tokens = Tokens.drawn()
    slots = tokens.slots.clone()
    slots[5] = -1
    made = world(slots=slots)
    ops.record_write(tokens.latent, tokens.rope, tokens.key, "attn", "index", "replicated")
    held = made.layers["attn"].kv_cache.view(-1, LATENT + ROPE)
    assert int(held.any(1).sum()) == 16 and not held[tokens.slots[5]].any()


def test_a_run_without_a_step_is_defined(world) -> None:
    """vLLM profiles a model before it has caches."""
    tokens = Tokens.drawn()
    made = world()
    indices, out = _run(tokens, made, torch.arange(17))
    assert (indices == -1).all() and not out.any()
    assert not made.layers["index"].kv_cache.any()


@pytest.mark.parametrize("layout", ["replicated", "rank_major"])
@pytest.mark.parametrize("planned", ["replicated", "rank_major"])
@pytest.mark.parametrize("more", [0, 1, 17, 18])
def test_layout_is_compared_and_never_guessed(world, layout: str, planned: str, more: int) -> None:
    """Rows of one layout can be as many as those of the other, exactly, padded or doubled."""
    tokens = Tokens.drawn()
    slots = torch.cat([tokens.slots, torch.full((more,), -1)])
    made = world(layout=planned, slots=slots)
    call = lambda: ops.record_write(tokens.latent, tokens.rope, tokens.key, "attn", "index", layout)  # noqa: E731
    if layout == planned and not more:
        call()
        assert made.layers["index"].kv_cache.any()
        return
    with pytest.raises(ConfigError, match=rf"found 17 {layout} rows and {17 + more} {planned} slots; required one"):
        call()
    assert not made.layers["index"].kv_cache.any() and not made.layers["attn"].kv_cache.any()


def test_opcheck(world) -> None:
    tokens = Tokens.drawn()
    step = step_rows(torch.tensor([0, 11, 17]), torch.tensor([11, 6]), 17, TABLE)
    world(slots=tokens.slots, step=step)
    dep, chosen = torch.empty(0), torch.full((17, TOPK), -1, dtype=torch.int32)
    # Writes change caches that are no arguments, which only running them twice would show as a difference.
    checks = ("test_schema", "test_faketensor")
    for op, args in (
        (ops.record_write, (tokens.latent, tokens.rope, tokens.key, "attn", "index")),
        (ops.latent_write, (tokens.latent, tokens.rope, "attn")),
        (ops.index_topk, (tokens.index_q, tokens.weights, dep, "index", TOPK)),
        (ops.sparse_attend, (tokens.q, chosen, dep, "attn", VALUE)),
    ):
        torch.library.opcheck(op, args, test_utils=checks)


# -- the graph ---------------------------------------------------------------------------------------------


WIDTHS = (LATENT, ROPE, DIM, HEADS * (NOPE + ROPE), INDEX_HEADS * DIM, INDEX_HEADS)


def layers(rows: torch.Tensor) -> torch.Tensor:
    """A layer that selects and one that shares; ``rows`` holds all that the ops take."""
    latent, rope, key, q, index_q, weights = rows.split(WIDTHS, dim=1)
    rope, q, index_q = rope.unsqueeze(1), q.unflatten(1, (HEADS, -1)), index_q.unflatten(1, (INDEX_HEADS, -1))
    dep = ops.record_write(latent, rope, key, "0.attn", "0.index")
    chosen = ops.index_topk(index_q, weights, dep, "0.index", TOPK)
    first = ops.sparse_attend(q, chosen, dep, "0.attn", VALUE)
    dep = ops.latent_write(latent * 2, rope, "1.attn")
    return first + ops.sparse_attend(q * 2, chosen, dep, "1.attn", VALUE)


def _bodies() -> dict[str, str]:
    gm = toy_runs.traced(layers, torch.randn(17, sum(WIDTHS)))
    bodies = build_variants(gm, PassContext(2), [VerifyObserver("final")])
    return {variant: toy_runs.structure(body) for variant, body in bodies.items()}


def test_keys_are_gathered_with_the_latent() -> None:
    sharded = _bodies()["sharded"]
    assert sharded.count("pcp.all_gather_rows") == 2
    assert f"[{LATENT}, {ROPE}, {DIM}]" in sharded and f"[{LATENT}, {ROPE}]" in sharded
    assert sharded.count("layout='rank_major'") == 2


def test_replicated_body_is_left_as_it_is() -> None:
    replicated = _bodies()["replicated"]
    assert "all_gather" not in replicated and "rank_major" not in replicated


def test_gathered_queries_are_refused() -> None:
    """As a wrong rule would have it."""
    wrong = table.CacheWrite(rows=(0,))
    with table.temporary_rule(rules.INDEX_TOPK, wrong), pytest.raises(PcpError, match="vllm_index_topk"):
        _bodies()


def test_a_write_without_a_rule_meets_slots_of_another_layout(world) -> None:
    """No pass gathers its rows then, and the op says so."""
    with table.temporary_rule(rules.RECORD_WRITE, None):
        sharded = _bodies()["sharded"]
    assert sharded.count("rank_major") == 1
    tokens = Tokens.drawn()
    world(layout="rank_major", slots=torch.cat([tokens.slots, tokens.slots]))
    with pytest.raises(ConfigError, match="17 replicated rows and 34 rank_major slots"):
        ops.record_write(tokens.latent, tokens.rope, tokens.key, "attn", "index")


def test_every_op_has_a_rule() -> None:
    named = {op._schema.name for op in (ops.record_write, ops.latent_write, ops.index_topk, ops.sparse_attend)}
    assert named == set(rules.RULES) <= set(table.RULES)
