"""Reading a traced graph backwards from attention to the `fp4kv::dequantize` that K and V come from.

The graph is Dynamo's, before autograd: calls are the ones the user wrote, and it is not functional (values may be
written in place). Shapes: B batch, Hq query heads, H KV heads, L queries, S keys, D head size.
"""

from __future__ import annotations

import builtins
import math
import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from ..ops import checks


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
    mask_fills: bool = False
    """A hidden key has a finite score, so that a query that sees no key gets the mean of all V, and not 0."""
    causal: bool = False
    scale: float | None = None
    chain: tuple[Node, ...] = field(default=())
    """Nodes of a written-out attention between K, V and `result`; each may have no other reader."""


def name_of(node: Any) -> str:
    """Name of the tensor's method, or the function of PyTorch or of Python's operators, that `node` calls; else ""."""
    if not isinstance(node, Node):
        return ""
    if node.op == "call_method":
        return str(node.target)
    name = getattr(node.target, "__name__", "")
    known = (torch, torch.nn.functional, operator, builtins)
    return name if any(getattr(module, name, None) is node.target for module in known) else ""


def bind(node: Node, *names: str) -> dict[str, Any]:
    """Arguments of `node` by name, the positional ones in the order of `names`."""
    return {**dict(zip(names, node.args)), **node.kwargs}


def operand(node: Any) -> Any:
    """The tensor whose method `node` calls, or the first argument of a function."""
    return node.args[0] if node.args else node.kwargs.get("input")


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
        if name in ("contiguous", "clone") or is_cast(node):
            node = operand(node)
        elif name == "repeat_interleave":
            arguments = bind(node, "input", "repeats", "dim")
            if arguments.get("dim") not in (1, -3) or _is_tensor(arguments["repeats"]):
                break
            node = arguments["input"]
        elif name in ("reshape", "view", "flatten") and name_of(operand(node)) == "expand":
            expand = operand(node)
            inserted = expand.args[0]
            if not _is_repeat_kv(inserted, expand, node):
                break
            chain += [expand, inserted]
            node = operand(inserted)
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
            called = getattr(node.target, "__name__", node.target)
            raise Refused(f"K or V goes through {called!r} on the way from dequantize")
        behind = operand(behind) if isinstance(behind, Node) else None


def _is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("example_value"), torch.Tensor)


def is_cast(node: Any) -> bool:
    """Whether `node` turns one of the floating dtypes that attention takes into another, on the same device."""
    if name_of(node) not in ("to", "type_as", "float", "half", "bfloat16"):
        return False
    before, after = value_of(operand(node)), value_of(node)
    return {before.dtype, after.dtype} <= set(checks.FLOATING) and before.device == after.device


def _is_repeat_kv(inserted: Node, expand: Node, merged: Node) -> bool:
    """Whether `x[:, :, None].expand(B, H, n, S, D).reshape(B, H · n, S, D)` is what the three nodes do."""
    if name_of(inserted) == "getitem":
        index: Any = inserted.args[1]
        if any(part not in (None, Ellipsis, slice(None)) for part in (index if isinstance(index, tuple) else (index,))):
            return False
    elif name_of(inserted) != "unsqueeze":
        return False
    before = value_of(operand(inserted)).shape
    if len(before) != 4:
        return False
    batch, heads, tokens, dim = before
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
    """The attention whose last step is the matmul `node`; None if it is another product.

    With scores of -inf throughout, its softmax gives NaN and ours 0, as SDPA's does.
    """
    probabilities, values = _factors(node)
    chain: list[Any] = []
    drops = False
    while name_of(probabilities) == "dropout" or is_cast(probabilities):
        chain.append(probabilities)
        if name_of(probabilities) == "dropout":
            dropout = bind(probabilities, "input", "p", "training")
            drops = drops or (dropout.get("training", True) and dropout.get("p", 0.5) != 0.0)
        probabilities = operand(probabilities)
    if name_of(probabilities) != "softmax":
        return None
    softmax = bind(probabilities, "input", "dim")
    v = find_stored(values)
    scores = _scores(softmax["input"], v) if v is not None else None
    if scores is None:
        return None
    if drops:
        raise Refused("dropout is on")
    if softmax.get("dim") not in (-1, 3):
        raise Refused("softmax is not over the keys")
    return replace(scores, result=node, chain=(*chain, probabilities, *scores.chain))


def _factors(node: Node) -> tuple[Any, Any]:
    """Both factors of a matmul; None for each if it is told more, as `out`."""
    given = bind(node, "input", "other")
    return (given["input"], given["other"]) if set(given) == {"input", "other"} else (None, None)


_SCORE_STEPS = {"mul": 2, "truediv": 2, "div": 2, "add": 2, "masked_fill": 3, "where": 3}
"""Arguments of each."""


def _scores(node: Any, v: Stored) -> Attention | None:
    """`scale · q kᵀ + mask` traced back from `node`; None if it is something else."""
    name = name_of(node)
    if is_cast(node):
        inner = _scores(operand(node), v)
        return inner and _with(inner, node)
    if name == "matmul":
        q, transposed = _factors(node)
        k = find_stored(_untransposed(transposed))
        if k is None:
            return None
        return Attention(node, q, k, v, scale=1.0, chain=(node, transposed))
    if node is None or len(getattr(node, "args", ())) != _SCORE_STEPS.get(name) or node.kwargs:
        return None
    if name in ("mul", "truediv", "div"):
        first, second = node.args[:2]
        if name == "mul" and isinstance(first, int | float):
            first, second = second, first
        inner = _scores(first, v)
        if inner is None:
            return None
        if not isinstance(second, int | float) or second == 0 or inner.mask is not None or inner.scale is None:
            raise Refused("scores are scaled by something other than a constant before the mask")
        scale = inner.scale * second if name == "mul" else inner.scale / second
        return _with(inner, node, scale=scale)
    if name == "add":
        for first, second in (node.args[:2], node.args[1::-1]):
            inner = _scores(first, v)
            if inner is not None:
                if _masked(inner, second).dtype == torch.bool:
                    raise Refused("a bool mask is added to the scores")
                return _with(inner, node, mask=second)
        return None
    scores, mask, fill = node.args if name == "masked_fill" else (node.args[1], node.args[0], node.args[2])
    inner = _scores(scores, v)
    if inner is None:
        return None
    if not isinstance(fill, int | float) or not fill <= -1e4:
        raise Refused("hidden scores are filled with something other than a large negative constant")
    if _masked(inner, mask).dtype != torch.bool:
        raise Refused(f"the mask of {name} is not bool")
    return _with(inner, node, mask=mask, mask_hides=name == "masked_fill", mask_fills=fill != -math.inf)


def _masked(inner: Attention, mask: Any) -> torch.Tensor:
    """The fake tensor of the `mask` that `inner` gets."""
    if inner.mask is not None:
        raise Refused("two masks are applied")
    if not _is_tensor(mask):
        raise Refused("the mask is not a tensor")
    return value_of(mask)


def _with(inner: Attention, node: Node, **changes: Any) -> Attention:
    return replace(inner, chain=(*inner.chain, node), **changes)


def _untransposed(node: Any) -> Any:
    """x where `node` is `x` with its last two of four axes swapped."""
    name = name_of(node)
    if name in ("transpose", "swapaxes", "swapdims"):
        axes = [*node.args[1:], *[value for key, value in node.kwargs.items() if key != "input"]]
        if {axis % 4 for axis in axes} == {2, 3}:
            return operand(node)
    if name == "permute":
        order = node.kwargs.get("dims", node.args[1:])
        order = order[0] if isinstance(order[0], tuple | list) else order
        if [axis % 4 for axis in order] == [0, 1, 3, 2]:
            return operand(node)
    if name == "mT" or (name == "getattr" and node.args[1] == "mT"):  # from torch 2.14 on, and before
        return node.args[0]
    return None


def written(node: Node) -> list[Any]:
    """What `node` writes in place."""
    if node.op in ("placeholder", "get_attr", "output"):
        return []
    target = node.target
    if node.op == "call_module" or isinstance(target, torch._ops.HigherOrderOperator) or _is_users(target):
        raise Refused("a nested module, a region or a function that is not PyTorch's lies between")
    out = node.kwargs.get("out")
    result = [*out] if isinstance(out, tuple | list) else [out]
    if isinstance(target, torch._ops.OpOverloadPacket | torch._ops.OpOverload):
        overloads: list[Any] = [target]
        if isinstance(target, torch._ops.OpOverloadPacket):
            overloads = [getattr(target, overload) for overload in target.overloads()]
        for overload in overloads:
            for position, argument in enumerate(overload._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
                    result.append(given)
    elif _is_in_place(node):
        result.append(operand(node))
    flat = [each for one in result for each in (one if isinstance(one, tuple | list) else [one])]
    return [each for each in flat if each is not None]


def _is_users(target: Any) -> bool:
    """Whether `target` is a function that the user let into the graph, of which nobody knows what it writes."""
    module = getattr(target, "__module__", None)
    return callable(target) and module is not None and module.split(".")[0] not in _KNOWN_MODULES


def _is_in_place(node: Node) -> bool:
    target: Any = node.target
    name = str(getattr(target, "__name__", target))
    if node.op == "call_method":
        target = getattr(operator, name, name)  # `x.__imul__(y)`
    if getattr(target, "__module__", "") == "_operator":
        return target in _IN_PLACE_OPERATORS
    return (name.endswith("_") and not name.endswith("__")) or node.kwargs.get("inplace") is True


_KNOWN_MODULES = ("torch", "_operator", "builtins", "math")

_IN_PLACE_OPERATORS = {
    operator.setitem,
    *[getattr(operator, name) for name in dir(operator) if name[0] == "i" and f"__{name[1:]}__" in dir(operator)],
}
