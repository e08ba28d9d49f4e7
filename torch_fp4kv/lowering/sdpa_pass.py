"""The pass that turns attention over dequantised tensors into `fp4kv::attention` over the cache.

For code that holds K and V as tensors (`materialize=True`, hand-written models). It runs before autograd, where
`scaled_dot_product_attention` is still one call with the arguments that the user gave. What it cannot prove equal it
leaves, and `lowering.report()["sdpa"]` says why. Shapes: B batch, Hq query heads, H KV heads, L queries, S keys.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

from ..ops import checks
from . import cache_key, registry
from .sdpa_match import (
    Attention,
    Refused,
    is_dequantize,
    match_sdpa,
    match_written_out,
    name_of,
    same,
    value_of,
    written,
)


class SdpaPass(CustomGraphPass):
    """Rewrites a graph in place, each attention on its own."""

    def __call__(self, graph: Graph) -> None:
        if not any(is_dequantize(node) for node in graph.nodes):
            return
        for node in list(graph.nodes):
            match = _MATCHERS.get(name_of(node))
            if match is None:
                continue
            try:
                attention = match(node)
                if attention is not None:
                    _check(attention, graph)
                    _rewrite(attention, graph)
                    registry.record("sdpa", "rewritten")
            except Refused as reason:
                registry.record("sdpa", str(reason))

    def uuid(self) -> str:
        return cache_key.source_digest()


_OUTWEIGHED = -1e30
"""Added to a score it gives itself, whatever the score was; times log2 e it is still finite."""

_MATCHERS: dict[str, Callable[[Node], Attention | None]] = {
    "scaled_dot_product_attention": match_sdpa,
    "matmul": match_written_out,
}


def _check(attention: Attention, graph: Graph) -> None:
    """Raises Refused unless `fp4kv::attention` may take the place of `attention`."""
    k, v = attention.k, attention.v
    q, out = value_of(attention.q), value_of(attention.result)
    if torch.is_grad_enabled() and out.requires_grad:
        raise Refused("gradients are recorded")
    if {q.dtype, out.dtype} - set(checks.FLOATING):
        raise Refused(f"q is {q.dtype}")
    k_words, v_words = value_of(k.argument("words")), value_of(v.argument("words"))
    if q.ndim != 4 or k_words.ndim != 4 or v_words.ndim != 4:
        raise Refused("q, K and V are not all 4-dimensional")
    if not same((k_words.shape[0], q.shape[0]), *zip(k_words.shape[:3], v_words.shape[:3])):
        raise Refused("the storage of K and V is not one page for each row of q")
    storage = [stored.argument(name) for stored in (k, v) for name in ("words", "scales")]
    if not all(value_of(node).is_contiguous() for node in storage if node is not None):
        raise Refused("the storage is not contiguous")
    if not same(*zip(out.shape[:3], q.shape[:3])):
        raise Refused("q is broadcast to more rows, heads or queries")
    for stored in (k, v):
        scale = value_of(stored.argument("global_scale"))
        if scale.ndim > 1 or (scale.ndim == 1 and not same((scale.shape[0], k_words.shape[1]))):
            raise Refused("the global scale is per row")
    if k.option("scale_layout", "linear") != "linear":
        raise Refused("K's scales are in the 4-token layout")
    if k.option("bias", None) is not None or v.option("bias", None) is not None:
        raise Refused("dequantize adds a bias")
    keys = value_of(k.view).shape[2]
    if not same((keys, value_of(v.view).shape[2])):
        raise Refused("K and V differ in length")
    if attention.causal and not same((q.shape[2] <= keys, True)):
        raise Refused("is_causal with more queries than keys")
    if attention.scale is not None and not math.isfinite(attention.scale):
        raise Refused("the scale is not finite")
    if attention.mask is not None:
        mask = value_of(attention.mask)
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise Refused(f"the mask is {mask.dtype}")
        if not 1 <= mask.ndim <= 4 or not same((mask.shape[-1], keys)):
            raise Refused("the mask has not one column for each key")
    chain = (*k.chain, *v.chain, *attention.chain)
    if any(len(node.users) != 1 for node in chain if node is not attention.result):
        raise Refused("something else reads the dequantised tensor or the scores")
    _check_writes(attention, graph)


def _check_writes(attention: Attention, graph: Graph) -> None:
    """Refuses if an operand is written in place after the user's code has read it: `result` would read it anew.

    Graph inputs may share memory that their traced tensors don't show, so that a write to one may be to any.
    """
    chain = {attention.result, *attention.chain, *attention.k.chain, *attention.v.chain}
    inputs = {_storage(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    read: set[Any] = set()
    for node in graph.nodes:
        if node is attention.result:
            return
        if read and any(_storage(target) in {None, *read, *inputs} for target in written(node)):
            raise Refused("an in-place write lies between dequantize and attention")
        if node in chain:
            read |= {_storage(operand) for operand in node.all_input_nodes if operand not in chain}


def _storage(node: Any) -> Any:
    """Identity of the memory behind `node`; None for what is no traced tensor."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _rewrite(attention: Attention, graph: Graph) -> None:
    k, v, result = attention.k, attention.v, attention.result
    out = value_of(result)
    with graph.inserting_before(result):
        mask = attention.mask
        if attention.mask_fills:
            values = (_OUTWEIGHED, 0.0) if attention.mask_hides else (0.0, _OUTWEIGHED)
            mask = graph.call_function(torch.where, (mask, *values))
        elif attention.mask_hides:
            mask = graph.call_function(torch.logical_not, (mask,))
        new = graph.call_function(
            torch.ops.fp4kv.attention.default,
            (
                attention.q,
                k.argument("words"),
                k.argument("scales"),
                v.argument("words"),
                v.argument("scales"),
                k.argument("global_scale"),
                v.argument("global_scale"),
                _lengths(attention, graph),
            ),
            {
                "mask": mask,
                "causal": attention.causal,
                "scale": attention.scale,
                "k_format": k.option("format", "nvfp4"),
                "v_format": v.option("format", "nvfp4"),
                "v_scale_layout": v.option("scale_layout", "linear"),
                "out_dtype": out.dtype,
            },
        )
        if not out.is_contiguous() and out.transpose(1, 2).is_contiguous():
            # SDPA's result often lies as [B, L, Hq, D] in memory, and a `view` after it counts on that.
            for method, arguments in (("transpose", (1, 2)), ("contiguous", ()), ("transpose", (1, 2))):
                new = graph.call_method(method, (new, *arguments))
    new.meta.update(result.meta)
    result.replace_all_uses_with(new)
    replaced = {result, *attention.chain, *k.chain, *v.chain}
    for node in reversed(list(graph.nodes)):
        if node in replaced and not node.users:
            graph.erase_node(node)


def _lengths(attention: Attention, graph: Graph) -> Node:
    """int32 `[B]`: positions that a row's queries may see.

    SDPA's `is_causal` counts queries and keys from the start, ours from the end: with L keys the two agree.
    """
    q, words, limit = attention.q, attention.k.argument("words"), attention.k.limit
    tokens: Any = value_of(q if attention.causal else attention.k.view).shape[2]
    if not isinstance(tokens, int):
        if not attention.causal and limit is not None:
            words = graph.call_function(operator.getitem, (words, limit.args[1]))
        tokens = graph.call_method("size", (q if attention.causal else words, 2))
    rows: Any = value_of(q).shape[0]
    if not isinstance(rows, int):
        rows = graph.call_method("size", (q, 0))
    device = value_of(q).device
    return graph.call_function(torch.full, ((rows,), tokens), {"dtype": torch.int32, "device": device})
