# SPDX-License-Identifier: Apache-2.0
"""pack-records: what a token adds to the caches of one MLA layer becomes one record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from pcp_passes.ir import meta, rules
from pcp_passes.paged.records import Store, pack_record_op, record_write_op
from pcp_passes.passes.base import Note, PassContext, PassResult, note


@dataclass(frozen=True)
class PackRecords:
    """Write latent, rope key and index key of a layer as one record, packed where the row is made.

    Why: ranks gather what they write. Three operands of two writes are one collective when they are one tensor, and a
    record in the bytes of the cache (788 instead of 1408 at 512 + 64 + 128) is gathered as it will be kept: a row is
    quantised by itself, so packing commutes with the gather. Runs before the variants are made; the reshards that
    follow see one row operand per layer, and the replicated body writes the same records.

    Before::

        %kv_write = pcp.kv_write(%latent, %rope, 'target.0')
        %index_write = pcp.index_write(%key, 'target.0')
        %index_topk = pcp.index_topk(%index_q, %weights, %index_write, 'target.0', 2048)
        %mla_attend = pcp.mla_attend(%q, %kv_write, 'target.0', scale=0.1, latent=512, indices=%index_topk)

    After::

        %pack_record = pcp.pack_record(%latent, %rope, %key, 'fp8')
        %record_write = pcp.record_write(%pack_record, 'target.0', 512, 64, 128)
        %index_topk = pcp.index_topk(%index_q, %weights, %record_write, 'target.0', 2048)
        %mla_attend = pcp.mla_attend(%q, %record_write, 'target.0', scale=0.1, latent=512, indices=%index_topk)
    """

    store: Store = "native"
    """What a record holds: ``native`` values of the rows' dtype, ``bf16`` values, or ``fp8`` with scales."""

    name: ClassVar[str] = "pack-records"
    requires: ClassVar[frozenset[str]] = frozenset()
    establishes: ClassVar[frozenset[str]] = frozenset()
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        return pack_records(graph, self.store)


def pack_records(graph: fx.Graph, store: Store) -> PassResult:
    """Replace the cache writes of every layer whose attention is latent.

    A layer keeps a record of its own for the index key where the latent is read before that key is written.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    indexers = {rules.layer_of(node): node for node in order if rules.op_name(node) == "pcp::index_write"}
    count = 0
    notes: list[Note | str] = []
    for write in list(order):
        if rules.op_name(write) != "pcp::kv_write" or not _is_latent(write):
            continue
        index = indexers.get(rules.layer_of(write))
        if index is not None and not _may_wait(write, index, order):
            notes.append(note(f"read before %{index.name} writes the index key: left apart", write))
            continue
        notes.append(note(_pack(graph, write, index, order, store), write))
        count += 1
    if not count:
        notes.append("the graph writes no latent cache")
    return PassResult(count, tuple(notes))


def _is_latent(write: fx.Node) -> bool:
    """Whether the write is of one head that only latent attention reads."""
    latent = meta.tensor(rules.argument(write, 0))
    readers = {rules.op_name(user) for user in write.users}
    return readers == {"pcp::mla_attend"} and latent is not None and latent.dim() == 3 and latent.shape[1] == 1


def _may_wait(write: fx.Node, index: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether the later of two writes still comes before everything that reads either."""
    last = max(order[write], order[index])
    return all(order[user] > last for user in (*write.users, *index.users))


def _pack(graph: fx.Graph, write: fx.Node, index: fx.Node | None, order: dict[fx.Node, int], store: Store) -> str:
    late = write if index is None else max(write, index, key=order.__getitem__)
    latent, rope = (rules.argument(write, position) for position in (0, 1))
    key = None if index is None else rules.argument(index, 0)
    layer = rules.layer_of(write)
    widths = [0 if part is None else _width(part) for part in (latent, rope, key)]
    with graph.inserting_before(late):

        def make(target: Any, *args: Any) -> fx.Node:
            node = graph.create_node("call_function", target, args, name=target._opname)
            return meta.adopt(node, late, PackRecords.name, layer=layer)

        record = make(pack_record_op, latent, rope, key, store)
        written = make(record_write_op, record, layer, *widths)
    for replaced in (write, index):
        if replaced is not None:
            replaced.replace_all_uses_with(written)
            graph.erase_node(replaced)
    held = meta.tensor(record)
    assert held is not None, f"%{record.name} has no value"
    parts = f"{widths[0]} + {widths[1]}" + (f" + {widths[2]}" if key is not None else "")
    return f"a record of {parts}: {int(held.shape[1]) * held.element_size()} bytes"


def _width(rows: fx.Node) -> int:
    held = meta.tensor(rows)
    assert held is not None, f"%{rows.name} has no value"
    return int(held.shape[-1])
