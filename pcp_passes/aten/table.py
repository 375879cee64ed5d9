# SPDX-License-Identifier: Apache-2.0
"""The rule table of core ATen: how each op treats token rows.

An op without an entry falls back: its operands are restored, it runs replicated, and the report says what that costs.
Absent on purpose, because their token dimension, where they have one, is what they work on:

* ``as_strided``: reads storage by strides, which a restored operand does not keep (refused, see ``FORBIDDEN``);
* scans and convolutions along tokens, ``roll``, ``flip``, ``diff``, ``tril``, ``triu``, ``searchsorted``, ``nonzero``;
* sums of products over tokens (linear attention): a partial sum per rank would change the rounding;
* random ops: ranks would draw different numbers (refused).
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import fx

from pcp_passes.aten import experts, indexing, matmuls, pointwise, reductions, sparse, views
from pcp_passes.aten.decision import Call, CannotTell, Decision, Local, Mixes, Rule, argument, argument_names
from pcp_passes.errors import ConfigError
from pcp_passes.ir import meta, rules
from pcp_passes.ir.placements import Shard, Tied

_NAMES: tuple[tuple[Rule, str], ...] = (
    (pointwise.pointwise, """
        _to_copy alias clone contiguous copy detach empty_like fill full_like lift_fresh_copy masked_fill ones_like
        where zeros_like clamp clip floor_divide remainder fmod nan_to_num gelu leaky_relu elu
        celu selu hardtanh hardswish hardsigmoid softplus mish silu relu relu6 sigmoid tanh logsigmoid log_sigmoid
        logit erf exp log log1p expm1 sqrt rsqrt reciprocal pow square abs sign neg floor ceil round trunc frac sin
        cos tan asin acos atan atan2 sinh cosh isnan isinf isfinite eq ne lt le gt ge logical_and logical_or
        logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor __and__ __or__ __xor__ __lshift__
        __rshift__ add sub rsub mul div true_divide divide multiply subtract addcmul addcdiv lerp maximum minimum
        fmax fmin threshold softshrink hardshrink polar complex real imag
        special_expit xlogy hypot exp2 log2 log10 sgn heaviside positive
    """),
    (pointwise.dropout, "dropout native_dropout alpha_dropout feature_dropout"),
    (views.permute, "permute"),
    (views.transpose, "transpose t mT swapaxes swapdims adjoint numpy_T matrix_H"),
    (views.movedim, "movedim moveaxis"),
    (views.unsqueeze, "unsqueeze"),
    (views.squeeze, "squeeze"),
    (views.expand, "expand broadcast_to"),
    (views.select, "select"),
    (views.slice_, "slice"),
    (views.split, "split split_with_sizes chunk unbind unsafe_split unsafe_chunk split_copy"),
    (views.reshape, "view reshape _unsafe_view flatten unflatten view_copy _reshape_copy"),
    (views.repeat, "repeat tile"),
    (views.repeat_interleave, "repeat_interleave"),
    (views.unfold, "unfold"),
    (views.as_complex, "view_as_complex view_as_real"),
    (reductions.along, """
        sum mean amax amin prod any all argmax argmin max min softmax log_softmax _softmax _log_softmax logsumexp
        linalg_vector_norm norm var std var_mean std_mean cumsum cumprod logcumsumexp cummax cummin sort topk argsort
        count_nonzero nansum median kthvalue flip roll glu _safe_softmax
        fft_fft fft_ifft fft_rfft fft_irfft
    """),
    (reductions.over_last, "layer_norm rms_norm native_layer_norm _fused_rms_norm"),
    (reductions.batch_first, "conv1d conv2d conv3d convolution group_norm"),
    (matmuls.linear, "linear"),
    (matmuls.matmul, "mm bmm matmul"),
    (matmuls.addmm, "addmm baddbmm"),
    (matmuls.einsum, "einsum"),
    (matmuls.attention, "scaled_dot_product_attention"),
    (indexing.embedding, "embedding"),
    (indexing.index_select, "index_select"),
    (indexing.gather, "gather take_along_dim"),
    (indexing.scatter, "scatter scatter_add scatter_reduce"),
    (indexing.index, "index"),
    (indexing.index_put, "index_put"),
    (indexing.cat, "cat concat concatenate"),
    (indexing.stack, "stack"),
    (indexing.slice_scatter, "slice_scatter select_scatter"),
    (indexing.pad, "constant_pad_nd pad"),
    (indexing.one_hot, "one_hot"),
)  # fmt: skip

TABLE: dict[str, Rule] = {f"aten::{name}": rule for rule, names in _NAMES for name in names.split()}
TABLE["pcp::attend"] = matmuls.attend
TABLE["pcp::select_keys"] = sparse.select_keys
TABLE["pcp::sparse_attend"] = TABLE["pcp::sparse_attend_heads"] = sparse.sparse_attend

FORBIDDEN: dict[str, str] = {
    "aten::as_strided": "reads storage by strides: a restored operand has the strides of a fresh tensor",
    "aten::as_strided_scatter": "writes storage by strides: a restored operand has the strides of a fresh tensor",
}
"""Neither on rows nor replicated, when an operand comes from sharded rows."""

_RANDOM = frozenset(
    f"aten::{name}" for name in
    "rand rand_like randn randn_like randint randint_like randperm bernoulli multinomial normal rrelu uniform"
    " exponential poisson binomial".split()
)  # fmt: skip


def register_token_rule(name: str, rule: Rule) -> None:
    """Teach the passes an op: ``rule`` answers whether the op ``name`` (``"namespace::op"``) runs on local rows.

    See :mod:`pcp_passes.aten.decision` for what a rule promises.

    Raises:
        ConfigError: ``name`` is not qualified.
    """
    if "::" not in name:
        raise ConfigError(f"rule for {name!r}: found an unqualified op name; required 'namespace::op'")
    TABLE[name] = rule


def rule_for(node: fx.Node) -> Rule | None:
    """The node's rule: from the table, or by the ``pointwise`` tag that PyTorch gives an op."""
    name = rules.op_name(node)
    if name in TABLE:
        return TABLE[name]
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags and name not in _RANDOM:
        return pointwise.pointwise
    return None


def decide(call: Call, pinned: Container[str] = ()) -> Decision:
    """What the table says of a call with at least one operand that is not replicated.

    ``pinned`` names sorts that may not start a region of sorted rows (see :mod:`pcp_passes.aten.experts`).
    """
    try:
        found = _decide(call, pinned)
    except CannotTell as why:
        return Mixes(str(why))
    return found if isinstance(found, Mixes) or _sizes_agree(call, found) else Mixes("its sizes contradict its rule")


def _decide(call: Call, pinned: Container[str]) -> Decision:
    rule = rule_for(call.node)
    if any(isinstance(where, Tied) for where in call.placed):
        return experts.tied(call, rule)
    if (started := experts.start(call, pinned)) is not None:
        return started
    return Mixes(f"no rule for {rules.op_name(call.node)}") if rule is None else rule(call)


def _sizes_agree(call: Call, found: Local) -> bool:
    """A second look at every answer: what is said to be rows has as many as the placement says."""
    results = meta.value(call.node)
    outs = found.out if isinstance(found.out, tuple) else (found.out,)
    held = [*(results if isinstance(found.out, tuple) else (results,)), *(meta.value(n) for n in call.operands)]
    for where, value in zip((*outs, *found.needs), held, strict=True):
        if not isinstance(where, Shard):
            continue
        if not isinstance(value, torch.Tensor) or not 0 <= where.dim < value.dim():
            return False
        if call.count(value.shape[where.dim]) != where.outer * where.inner:
            return False
    return True


def is_random(node: fx.Node) -> bool:
    """Whether an op draws random numbers, given its arguments."""
    target = node.target
    if rules.op_name(node) in _RANDOM:
        return True
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = argument_names(node)
    rate = next((n for n in ("dropout_p", "p") if n in names), None)
    draws = next((n for n in ("train", "training") if n in names), None)
    return not ((rate and argument(node, rate) == 0) or (draws and not argument(node, draws)))
