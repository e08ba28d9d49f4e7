"""Private PyTorch API that this package uses, found by feature and kept in one place.

Checked against torch 2.11 to 2.15. Nothing here imports `torch._inductor` before a function is called: importing it
costs seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch


def inductor_is_loaded() -> bool:
    """Whether something in this process has imported Inductor's lowerings."""
    module = sys.modules.get("torch._inductor.lowering")
    return module is not None and hasattr(module, "process_subgraph_nodes")


def register_lowering(op: Any, lower: Callable[..., Any], *, as_in_eager: bool) -> None:
    """Makes `lower` Inductor's lowering of the overload `op`, also where Inductor has already set up a fallback.

    Args:
        as_in_eager: inputs get the strides that they were traced with, for a lowering that mostly calls `op`.
    """
    from torch._inductor import lowering

    lowering.lowerings.pop(op, None)
    lowering._maybe_layout_constraints.pop(op, None)
    lowering.fallbacks.discard(op)
    lowering.needs_realized_inputs.discard(op)
    lowering.register_lowering(op, type_promotion_kind=None)(lower)
    if as_in_eager:
        lowering.add_layout_constraint(op, lowering.constrain_to_fake_tensors)


def fallback(op: Any) -> Callable[..., Any]:
    """The lowering that calls `op` itself as an opaque kernel."""
    from torch._inductor import lowering

    handler: Callable[..., Any] = lowering.fallback_handler(op, add_to_fallback_set=False)
    return handler


def static_int(size: Any) -> int:
    """The value of a possibly symbolic size, which the compiled code is then specialised to."""
    from torch._inductor.virtualized import V

    return int(V.graph.sizevars.guard_int(size))


def scatter(target: Any, value: Callable[..., Any], ranges: Sequence[Any], index: Callable[..., list[Any]]) -> None:
    """Writes `value(i)` to `target[index(i)]` in place, for each i in `ranges`; each element at most once."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    target.realize()
    buffer = ir.ComputedBuffer(
        name=None,
        layout=ir.MutationLayoutSHOULDREMOVE(target),
        data=ir.Scatter(
            device=target.get_device(),
            dtype=target.get_dtype(),
            inner_fn=value,
            ranges=list(ranges),
            output_indexer=index,
        ),
    )
    buffer.name = V.graph.register_buffer(buffer)
    V.graph.register_operation(buffer)


def reduction(
    kind: str, inner: Callable[..., Any], ranges: Sequence[Any], size: int, dtype: torch.dtype, device: torch.device
) -> Any:
    """A realised reduction ("max" or "sum") of `inner(i, (r,))` over r < `size`."""
    from torch._inductor import ir

    result = ir.Reduction.create(
        device=device,
        dst_dtype=dtype,
        src_dtype=dtype,
        inner_fn=inner,
        ranges=list(ranges),
        reduction_ranges=[size],
        reduction_type=kind,
        reduction_hint=ir.ReductionHint.INNER,
    )
    result.realize()
    return result


def divide(x: Any, y: Any) -> Any:
    """float32 `x / y` in IR, rounded to nearest on every device.

    Torch 2.11 has no such operation: there the quotient is taken in float64, wide enough to be rounded twice.
    """
    from torch._inductor.ops_handler import OpsHandler
    from torch._inductor.virtualized import ops

    if hasattr(OpsHandler, "div_rn"):
        return ops.div_rn(x, y)
    wide = (ops.to_dtype(operand, torch.float64) for operand in (x, y))
    return ops.to_dtype(ops.truediv(*wide), torch.float32)


def pointwise(
    inner: Callable[..., Any],
    ranges: Sequence[Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    realize: bool = False,
) -> Any:
    """An elementwise result `inner(i)`, which Inductor may inline into its readers unless it is to `realize` it."""
    from torch._inductor import ir

    result = ir.Pointwise.create(device=device, dtype=dtype, inner_fn=inner, ranges=list(ranges))
    if realize:
        result.realize()
    return result


def apart_from(value: Any, targets: Sequence[Any]) -> Any:
    """`value`, copied if it is computed from memory of `targets`, which the kernel that writes them would read anew."""
    from unittest.mock import patch

    from torch._inductor import ir
    from torch._inductor.dependencies import extract_read_writes

    for target in targets:
        target.realize()
    load, size = value.make_loader(), value.get_size()
    with patch.object(ir.FlexibleLayout, "allow_indexing", True):
        reads = extract_read_writes(load, size).reads
    if {read.name for read in reads}.isdisjoint(target.get_name() for target in targets):
        return value
    return pointwise(load, size, value.get_dtype(), value.get_device(), realize=True)


def inductor_config() -> Any:
    from torch._inductor import config

    return config


def inductor_backend(mode: str | None, options: dict[str, Any] | None) -> Any:
    """What `torch.compile(backend="inductor", mode=mode, options=options)` compiles with."""
    return torch._TorchCompileInductorWrapper(mode, options, dynamic=None)


def compose_passes(first: Any, second: Any) -> Any:
    """One graph pass that runs `first`, then what a user has set: None, a pass, or (from torch 2.13) a list of them.

    Torch 2.11 takes a single pass, so that lists are unrolled here until it is dropped.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    if second is None:
        return first
    rest = list(second) if isinstance(second, list | tuple) else [second]

    class Composed(CustomGraphPass):
        passes = (first, *rest)

        def __call__(self, graph: torch.fx.Graph) -> None:
            for one in self.passes:
                one(graph)

        def uuid(self) -> Any:
            """None, which keeps Inductor from caching, where a user's pass has no uuid."""
            uuids = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self.passes]
            return None if None in uuids else uuids

    return Composed()


def is_tensor(value: Any) -> bool:
    """Whether an argument of a lowering stands for a tensor."""
    return hasattr(value, "get_size")


def is_static(value: Any) -> bool:
    """Whether an argument of a lowering has no symbolic size and is no symbol itself."""
    return not any(getattr(size, "free_symbols", None) for size in (value.get_size() if is_tensor(value) else [value]))


def current_fake_arguments() -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the op that is being lowered was traced with: fake tensors and constants."""
    from torch._inductor.virtualized import V

    node = V.graph.current_node

    def fake(argument: Any) -> Any:
        return argument.meta["val"] if isinstance(argument, torch.fx.Node) else argument

    return tuple(map(fake, node.args)), {name: fake(value) for name, value in node.kwargs.items()}


def inline(function: Callable[..., Any], arguments: Sequence[Any], fakes: Sequence[torch.Tensor]) -> Any:
    """Traces `function` over `fakes` and lowers its operations in place of the current one, over IR `arguments`."""
    from torch._inductor.codegen.subgraph import inline_subgraph_to_ir_nodes
    from torch._inductor.compile_fx import view_to_reshape
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    with V.fake_mode, torch.no_grad():
        graph = make_fx(function, decomposition_table=select_decomp_table())(*fakes)
    name = V.graph.current_node.name
    for node in graph.graph.find_nodes(op="get_attr"):
        # Inductor keeps nested graphs by name; ours must not meet those of another call.
        unique = f"{name}_{node.target}"
        setattr(graph, unique, getattr(graph, node.target))
        node.target = unique
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule):
            view_to_reshape(module)
            module.recompile()
    return inline_subgraph_to_ir_nodes(graph, list(arguments), name)


def compiles_ahead_of_time() -> bool:
    """Whether Inductor is making a package (AOTInductor)."""
    from torch._inductor.virtualized import V

    return bool(V.graph.aot_mode)


def while_loop(
    more: Callable[..., Any], step: Callable[..., Any], carried: tuple[Any, ...], others: tuple[Any, ...]
) -> Any:
    """`carried = step(*carried, *others)` as long as `more(*carried, *others)`, as one traced operation."""
    from torch._higher_order_ops.while_loop import while_loop_op

    return while_loop_op(more, step, carried, others)


def register_sharding(op: Any, rule: Callable[..., Any]) -> None:
    """Makes `rule` say how DTensor splits the overload `op`; see `torch.distributed.tensor.experimental`.

    DTensor keeps what a rule said, by default for all keyword arguments alike, which here change the answer. From torch
    2.14 it takes an op that mutates a keyword argument for an out variant, so such an op is called here, on the local
    tensors.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    dispatcher = DTensor._op_dispatcher
    if any(argument.is_out for argument in op._schema.arguments):
        dispatcher._custom_op_handlers[op] = _on_local_tensors(rule)
        return
    register_sharding(op)(rule)
    names = [argument.name for argument in op._schema.arguments if argument.kwarg_only]
    dispatcher.sharding_propagator.op_to_schema_info[op] = RuntimeSchemaInfo(static_kwargkey=names, needs_pytree=True)


def _on_local_tensors(rule: Callable[..., Any]) -> Callable[..., Any]:
    """What DTensor calls in place of an op without results."""
    from torch.distributed.tensor import DTensor

    def spec(argument: Any) -> Any:
        return argument._spec if isinstance(argument, DTensor) else argument

    def local(argument: Any, placement: Any) -> Any:
        if not isinstance(argument, DTensor):
            return argument
        if argument.placements != (placement,):
            argument = argument.redistribute(placements=[placement])
        return argument.to_local()

    def handler(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ((_, placements),) = rule(*map(spec, args), **{name: spec(value) for name, value in kwargs.items()})
        options = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in kwargs.items()}
        op(*map(local, args, placements), **options)

    return handler
