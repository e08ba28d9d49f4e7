"""Reading a traced graph backwards from attention to the `fp4kv::dequantize` that K and V come from.

The graph is Dynamo's, before autograd: calls are the ones the user wrote, and it is not functional (values may be
written in place). Shapes: B batch, Hq query heads, H KV heads, L queries, S keys, D head size.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node


class Refused(Exception):
    """The attention reads a dequantised tensor but cannot be rewritten; the message says why."""


@dataclass(frozen=True)
class Stored:
    """K or V: the dequantize call, the view of its result that attention reads, and the nodes between (both in)."""

    dequantize: Node
    view: Node
    chain: tuple[Node, ...]
    limit: Node | None
    """The slice `[:, :, :n]` on the way, or None."""

    def argument(self, name: str) -> Any:
        return bind(self.dequantize, "words", "scales", "global_scale")[name]

    def option(self, name: str, default: Any) -> Any:
        return self.dequantize.kwargs.get(name, default)


@dataclass(frozen=True)
class Attention:
    """One attention: `softmax(scale · q kᵀ + mask) v`, whose value is `result`."""

    result: Node
    q: Node
    k: Stored
    v: Stored
    mask: Node | None = None
    mask_hides: bool = False
    """The mask is True where a key is hidden (`masked_fill`), not where it is visible."""
    causal: bool = False
    scale: float | None = None
    chain: tuple[Node, ...] = field(default=())
    """Nodes of a written-out attention between K, V and `result`; each may have no other reader."""


def name_of(node: Any) -> str:
    """Name of the function or method that `node` calls; "" for anything else."""
    if not isinstance(node, Node):
        return ""
    if node.op == "call_method":
        return str(node.target)
    if node.op == "call_function":
        return str(getattr(node.target, "__name__", ""))
    return ""


def bind(node: Node, *names: str) -> dict[str, Any]:
    """Arguments of `node` by name, the positional ones in the order of `names`."""
    return {**dict(zip(names, node.args)), **node.kwargs}


def value_of(node: Any) -> torch.Tensor:
    """The fake tensor that Dynamo traced for `node`."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor):
        raise Refused("a value on the way is no tensor that was traced")
    return value


def same(*pairs: tuple[Any, Any]) -> bool:
    """Whether sizes are equal for certain, without a guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return all(statically_known_true(a == b) for a, b in pairs)


def is_dequantize(node: Any) -> bool:
    op = torch.ops.fp4kv.dequantize
    return isinstance(node, Node) and node.op == "call_function" and node.target in (op, op.default)


def find_stored(node: Any) -> Stored | None:
    """K or V `[B, Hq or H, S, D]` traced back through casts, slices and `repeat_kv`; None if it is not dequantised."""
    view = node
    chain: list[Any] = []
    limit = None
    while name_of(node) and not is_dequantize(node):
        chain.append(node)
        name = name_of(node)
        if name in ("to", "float", "half", "bfloat16", "contiguous", "clone"):
            node = node.args[0]
        elif name == "repeat_interleave":
            arguments = bind(node, "input", "repeats", "dim")
            if arguments.get("dim") not in (1, -3):
                break
            node = arguments["input"]
        elif name in ("reshape", "view", "flatten") and name_of(node.args[0]) == "expand":
            expand: Any = node.args[0]
            inserted = expand.args[0]
            if not _is_repeat_kv(inserted, expand, node):
                break
            chain += [expand, inserted]
            node = inserted.args[0]
        elif name == "expand" and _is_multi_query(node):
            node = node.args[0]
        elif name == "getitem" and limit is None and _is_prefix(node.args[1]):
            limit, node = node, node.args[0]
        else:
            break
    if is_dequantize(node):
        return Stored(node, view, (*chain, node), limit)
    _refuse_if_behind(node)
    return None


def _refuse_if_behind(node: Any) -> None:
    """Refuses if some dequantised tensor is behind `node` after all, as far as one can see along first arguments."""
    behind = node
    for _ in range(8):
        if is_dequantize(behind):
            raise Refused(f"K or V goes through {name_of(node)!r} on the way from dequantize")
        behind = behind.args[0] if isinstance(behind, Node) and behind.args else None


def _is_repeat_kv(inserted: Node, expand: Node, merged: Node) -> bool:
    """Whether `x[:, :, None].expand(B, H, n, S, D).reshape(B, H · n, S, D)` is what the three nodes do."""
    if name_of(inserted) not in ("getitem", "unsqueeze"):
        return False
    batch, heads, tokens, dim = value_of(inserted.args[0]).shape
    one, many, flat = value_of(inserted).shape, value_of(expand).shape, value_of(merged).shape
    if len(one) != 5 or len(many) != 5 or len(flat) != 4:
        return False
    repeats = many[2]
    return (
        same(*zip(one, (batch, heads, 1, tokens, dim)))
        and same(*zip(many, (batch, heads, repeats, tokens, dim)))
        and same(*zip(flat, (batch, heads * repeats, tokens, dim)))
    )


def _is_multi_query(expand: Node) -> bool:
    """Whether `expand` repeats a single KV head and nothing else."""
    before, after = value_of(expand.args[0]).shape, value_of(expand).shape
    if len(before) != 4 or len(after) != 4 or not same((before[1], 1)):
        return False
    return same(*[(before[i], after[i]) for i in (0, 2, 3)])


def _is_prefix(index: Any) -> bool:
    """Whether `x[index]` is `x[:, :, :n]` of a 4-dimensional x, or all of it."""
    parts = index if isinstance(index, tuple) else (index,)
    whole = slice(None)
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts = (*parts[:at], *[whole] * (5 - len(parts)), *parts[at + 1 :])
    if len(parts) > 4 or any(part != whole for i, part in enumerate(parts) if i != 2):
        return False
    tokens = parts[2] if len(parts) > 2 else whole
    return (
        isinstance(tokens, slice)
        and tokens.start in (None, 0)
        and tokens.step in (None, 1)
        and (tokens.stop is None or isinstance(tokens.stop, Node) or tokens.stop >= 0)
    )


def match_sdpa(node: Node) -> Attention | None:
    """The attention of a `scaled_dot_product_attention` call; None if neither K nor V is dequantised."""
    arguments = bind(node, "query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    k, v = find_stored(arguments["key"]), find_stored(arguments["value"])
    if k is None and v is None:
        return None
    if k is None or v is None:
        raise Refused("only one of K and V comes from dequantize")
    if arguments.get("dropout_p", 0.0) != 0.0:
        raise Refused("dropout is on")
    heads = value_of(arguments["query"]).shape[1], value_of(k.view).shape[1]
    if not arguments.get("enable_gqa", False) and not same(heads):
        raise Refused("K has another number of heads than q, and enable_gqa is off")
    scale = arguments.get("scale")
    if scale is not None and not isinstance(scale, int | float):
        raise Refused("scale is not a constant")
    return Attention(
        node,
        arguments["query"],
        k,
        v,
        mask=arguments.get("attn_mask"),
        causal=bool(arguments.get("is_causal", False)),
        scale=scale,
    )


def match_written_out(node: Node) -> Attention | None:
    """The attention whose last step is the matmul `node`; None if it is another product."""
    probabilities: Any = node.args[0]
    chain: list[Any] = []
    drops = False
    while name_of(probabilities) in ("to", "float", "half", "bfloat16", "type_as", "dropout"):
        chain.append(probabilities)
        if name_of(probabilities) == "dropout":
            dropout = bind(probabilities, "input", "p", "training")
            drops = drops or (dropout.get("training", True) and dropout.get("p", 0.5) != 0.0)
        probabilities = bind(probabilities, "input").get("input")
    if name_of(probabilities) != "softmax":
        return None
    softmax = bind(probabilities, "input", "dim")
    v = find_stored(node.args[1])
    scores = _scores(softmax["input"], v) if v is not None else None
    if scores is None:
        return None
    if drops:
        raise Refused("dropout is on")
    if softmax.get("dim") not in (-1, 3):
        raise Refused("softmax is not over the keys")
    return replace(scores, result=node, chain=(*chain, probabilities, *scores.chain))


_SCORE_STEPS = ("matmul", "mul", "truediv", "div", "add", "masked_fill", "where")


def _scores(node: Any, v: Stored) -> Attention | None:
    """`scale · q kᵀ + mask` traced back from `node`; None if it is something else."""
    name = name_of(node)
    if name in ("float", "to"):
        inner = _scores(node.args[0], v)
        return inner and _with(inner, node)
    if name not in _SCORE_STEPS or node.kwargs or len(node.args) < 2:
        return None
    if name == "matmul":
        k = find_stored(_untransposed(node.args[1]))
        if k is None:
            return None
        return Attention(node, node.args[0], k, v, scale=1.0, chain=(node, node.args[1]))
    if name in ("mul", "truediv", "div"):
        first, second = node.args[:2]
        if name == "mul" and isinstance(first, int | float):
            first, second = second, first
        inner = _scores(first, v)
        if inner is None:
            return None
        if not isinstance(second, int | float) or inner.mask is not None or inner.scale is None:
            raise Refused("scores are scaled by something other than a constant before the mask")
        scale = inner.scale * second if name == "mul" else inner.scale / second
        return _with(inner, node, scale=scale)
    if name == "add":
        for first, second in (node.args[:2], node.args[1::-1]):
            inner = _scores(first, v)
            if inner is not None:
                return _masked(inner, node, second, hides=False)
        return None
    scores, mask, fill = node.args[:3] if name == "masked_fill" else (node.args[1], node.args[0], node.args[2])
    inner = _scores(scores, v)
    if inner is None:
        return None
    if not isinstance(fill, int | float) or fill > -1e4:
        raise Refused("hidden scores are filled with something other than a large negative constant")
    return _masked(inner, node, mask, hides=name == "masked_fill")


def _masked(inner: Attention, node: Node, mask: Any, hides: bool) -> Attention:
    if inner.mask is not None:
        raise Refused("two masks are applied")
    if not isinstance(mask, Node):
        raise Refused("the mask is not a tensor")
    return _with(inner, node, mask=mask, mask_hides=hides)


def _with(inner: Attention, node: Node, **changes: Any) -> Attention:
    return replace(inner, chain=(*inner.chain, node), **changes)


def _untransposed(node: Any) -> Any:
    """x where `node` is `x` with its last two of four axes swapped."""
    name = name_of(node)
    if name in ("transpose", "swapaxes", "swapdims"):
        first, second = node.args[1:3]
        if {first % 4, second % 4} == {2, 3}:
            return node.args[0]
    if name == "permute":
        order = node.args[1] if isinstance(node.args[1], tuple | list) else node.args[1:]
        if [axis % 4 for axis in order] == [0, 1, 3, 2]:
            return node.args[0]
    if name == "mT" or (name == "getattr" and node.args[1] == "mT"):  # from torch 2.14 on, and before
        return node.args[0]
    return None


def written(node: Node) -> list[Any]:
    """What `node` writes in place."""
    if node.op == "call_module" or isinstance(node.target, torch._ops.HigherOrderOperator):
        raise Refused("a nested module or region lies between dequantize and attention")
    target = node.target
    name = name_of(node)
    result = [node.kwargs["out"]] if node.kwargs.get("out") is not None else []
    if isinstance(target, torch._ops.OpOverloadPacket | torch._ops.OpOverload):
        overloads: list[Any] = [target]
        if isinstance(target, torch._ops.OpOverloadPacket):
            overloads = [getattr(target, overload) for overload in target.overloads()]
        for overload in overloads:
            for position, argument in enumerate(overload._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
                    result.append(given)
        return result
    if getattr(target, "__module__", "") == "_operator":
        in_place = target in _IN_PLACE_OPERATORS
    else:
        in_place = (name.endswith("_") and not name.endswith("__")) or node.kwargs.get("inplace") is True
    if in_place:
        result.append(node.args[0] if node.args else None)
    return result


_IN_PLACE_OPERATORS = {
    operator.setitem,
    *[getattr(operator, name) for name in dir(operator) if name[0] == "i" and f"__{name[1:]}__" in dir(operator)],
}
