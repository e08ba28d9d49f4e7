"""Runs the PTX of a compiled kernel on the CPU: Gluon has no interpreter, this is one for what Triton makes of it.

One block at a time, all its threads in lockstep, registers as NumPy arrays with an element a thread. Branches must be
uniform. Reading or writing memory that no tensor occupies is an error. Asynchronous copies land as late as the program
allows (at the wait) or at once: a program that reads too early, or overwrites what it still needs, fails one of both.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any
from unittest import mock

import numpy as np
import offline
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
Step = Callable[["Block"], "str | None"]

BASE = 1 << 20
UNSIGNED = {"b8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64, "pred": np.bool_}
UNSIGNED |= {f"u{n}": UNSIGNED[f"b{n}"] for n in (8, 16, 32, 64)}
TYPES: dict[str, Any] = {
    **UNSIGNED,
    **{
        "s8": np.int8,
        "s16": np.int16,
        "s32": np.int32,
        "s64": np.int64,
        "f32": np.float32,
        "f16": np.float16,
        "f64": np.float64,
    },
}
COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    # Without the u, false where one is NaN.
    "ne": lambda a, b: (a != b) & (a == a) & (b == b),
    "neu": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "equ": lambda a, b: (a == b) | np.isnan(a) | np.isnan(b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}


class Memory:
    """Global memory: copies of tensors at addresses of their own, with gaps."""

    def __init__(self) -> None:
        self.size = BASE
        self.placed: list[tuple[int, Tensor]] = []
        self.bytes = np.zeros(0, np.uint8)
        self.owned = np.zeros(0, np.bool_)

    def place(self, x: Tensor) -> int:
        """Address of `x`; the whole storage moves along, so that views keep their strides."""
        storage = x.untyped_storage()
        for address, other in self.placed:
            if other.untyped_storage().data_ptr() == storage.data_ptr():
                return address + x.storage_offset() * x.element_size()
        address = self.size
        self.size += (storage.nbytes() + 511) // 256 * 256
        self.placed.append((address, x))
        return address + x.storage_offset() * x.element_size()

    def load(self) -> None:
        """Copies the tensors in."""
        self.bytes = np.full(self.size - BASE, 0xCD, np.uint8)
        self.owned = np.zeros(self.size - BASE, np.bool_)
        for address, x in self.placed:
            raw = _raw(x)
            self.bytes[address - BASE : address - BASE + raw.size] = raw
            self.owned[address - BASE : address - BASE + raw.size] = True

    def store(self) -> None:
        """Copies the tensors back."""
        for address, x in self.placed:
            raw = _raw(x)
            raw[:] = self.bytes[address - BASE : address - BASE + raw.size]

    def index(self, address: Array, width: int) -> Array:
        offset = address.astype(np.int64) - BASE
        assert ((offset >= 0) & (offset + width <= self.owned.size)).all(), "an address outside of global memory"
        assert self.owned[offset].all() and self.owned[offset + width - 1].all(), "memory that belongs to no tensor"
        assert (offset % width == 0).all(), f"an access of {width} bytes is not aligned"
        return offset


def _raw(x: Tensor) -> Array:
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).numpy()


class Block:
    """One block that runs: its registers and memories."""

    def __init__(
        self, memory: Memory, num_threads: int, shared: int, grid: Sequence[int], block: Sequence[int], eager: bool
    ) -> None:
        self.memory, self.num_threads, self.eager = memory, num_threads, eager
        self.registers: dict[str, Array] = {
            "%tid.x": np.arange(num_threads, dtype=np.uint32),
            "%laneid": np.arange(num_threads, dtype=np.uint32) % 32,
            "global_smem": np.zeros(num_threads, np.uint64),
        }
        for name, size, value in zip(("x", "y", "z"), grid, block):
            self.registers[f"%nctaid.{name}"] = np.full(num_threads, size, np.uint32)
            self.registers[f"%ctaid.{name}"] = np.full(num_threads, value, np.uint32)
        self.shared = np.full(max(shared, 16), 0xFF, np.uint8)
        self.group: list[Callable[[], None]] = []
        self.groups: list[list[Callable[[], None]]] = []

    def wait(self, outstanding: int) -> None:
        while len(self.groups) > outstanding:
            for copy in self.groups.pop(0):
                copy()


class Program:
    """A kernel's PTX, translated once."""

    def __init__(self, ptx: str, num_threads: int, shared: int) -> None:
        self.num_threads, self.shared = num_threads, shared
        self.labels: dict[str, int] = {}
        self.steps: list[Step] = []
        self.scopes: list[dict[str, str]] = []
        self.params: list[tuple[str, str]] = re.findall(r"\.param \.(\w+) (?:\.ptr \.global \.align \d+ )?(\w+)", ptx)
        pending = ""
        for line in _body(ptx):
            if line in ("{", "}") or re.fullmatch(r"\$\w+:", line):
                self._translate(line)
                continue
            *statements, pending = (pending + " " + line).split(";")
            for statement in statements:
                self._translate(statement.strip())

    def run(
        self, memory: Memory, values: Sequence[Any], grid: Sequence[int], block: Sequence[int], eager: bool
    ) -> None:
        state = Block(memory, self.num_threads, self.shared, grid, block, eager)
        scratch = [0] * (len(self.params) - len(values))
        for (kind, name), value in zip(self.params, [*values, *scratch]):
            state.registers[name] = np.full(self.num_threads, value, TYPES[kind]).view(UNSIGNED["b" + kind[1:]])
        counter = 0
        while counter < len(self.steps):
            target = self.steps[counter](state)
            if target == "ret":
                return
            counter = counter + 1 if target is None else self.labels[target]

    def _name(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def _translate(self, statement: str) -> None:
        if not statement:
            return
        if statement == "{":
            self.scopes.append({})
        elif statement == "}":
            self.scopes.pop()
        elif statement.startswith("$"):
            self.labels[statement.rstrip(":")] = len(self.steps)
        elif statement.startswith(".reg"):
            if self.scopes:
                for name in re.sub(r"\.reg\s+\.\w+", "", statement).split(","):
                    self.scopes[-1][name.strip()] = f"{name.strip()}#{len(self.steps)}"
        elif not statement.startswith("."):
            match = re.fullmatch(r"(?:@(!?)(%?\w+)\s+)?([a-z][\w.:]*)\s*(.*)", statement, re.DOTALL)
            assert match, f"not understood: {statement!r}"
            negated, predicate, opcode, rest = match.groups()
            step = self._step(opcode, self._operands(rest))
            self.steps.append(self._predicated(step, bool(negated), predicate and self._name(predicate), opcode))

    def _operands(self, text: str) -> list[Any]:
        """Operands: names, numbers, `[names]` for a vector, `("[]", name, offset)` for an address."""
        found: list[Any] = []
        for vector, address, plain in re.findall(r"\{([^}]*)\}|\[([^\]]*)\]|([^,\s{}\[\]]+)", text):
            if vector:
                found.append([self._value(x) for x in vector.split(",")])
            elif address:
                name, _, offset = address.replace(" ", "").partition("+")
                found.append(("[]", self._name(name), int(offset or 0)))
            else:
                found.append(self._value(plain))
        return found

    def _value(self, text: str) -> Any:
        text = text.strip()
        if re.fullmatch(r"-?\d+", text):
            return int(text)
        if re.fullmatch(r"0x[0-9a-fA-F]+U?", text):
            return int(text.rstrip("U"), 16)
        if re.fullmatch(r"0f[0-9a-fA-F]{8}", text):
            return int(text[2:], 16)
        return self._name(text)

    def _predicated(self, step: Step, negated: bool, predicate: str | None, opcode: str) -> Step:
        if predicate is None:
            return step

        def run(b: Block) -> str | None:
            active = b.registers[predicate] != negated
            if opcode.startswith("bra"):
                assert active.all() or not active.any(), "a branch that is not uniform"
                return step(b) if active.all() else None
            if opcode.startswith("st."):
                _store(b, opcode, step.operands, active)  # type: ignore[attr-defined]
                return None
            if active.any():
                before = dict(b.registers)
                mask, b.active = getattr(b, "active", None), active  # type: ignore[attr-defined]
                step(b)
                b.active = mask  # type: ignore[attr-defined]
                for name, value in b.registers.items():
                    old = before.get(name)
                    if old is not value:
                        b.registers[name] = np.where(active, value, value * 0 if old is None else old)
            return None

        return run

    def _step(self, opcode: str, operands: list[Any]) -> Step:
        parts = opcode.split(".")
        if parts[0] == "bra":
            return lambda b: operands[0]
        if parts[0] in ("ret", "exit"):
            return lambda b: "ret"
        if opcode.startswith("bar.") or parts[0] == "griddepcontrol" or parts[0] == "fence":
            return lambda b: None
        if parts[0] == "ld" and parts[1] == "param":
            return lambda b: _set(b, operands[0], b.registers[operands[1][1]])
        if parts[0] == "ld":
            return lambda b: _load(b, opcode, operands)
        if parts[0] == "st":
            step: Any = lambda b: _store(b, opcode, operands, np.ones(b.num_threads, np.bool_))  # noqa: E731
            step.operands = operands
            return step
        if opcode.startswith("cp.async"):
            return _async_copy(opcode, operands)
        special = SPECIAL.get(parts[0])
        if special is not None:
            return lambda b: special(b, opcode, operands)
        compute = COMPUTE[parts[0]]
        kinds = [p for p in parts[1:] if p in TYPES or p in ("bf16", "bf16x2", "f16x2", "e4m3x2", "f32x2")]

        rounds = kinds == ["bf16"]

        def run(b: Block) -> None:
            value = compute(b, parts, kinds, operands[1:])
            _set(b, operands[0], _bf16(value) if rounds and value.dtype == np.float32 else value)

        return run


def _body(ptx: str) -> list[str]:
    """Lines of the kernel, without comments."""
    text = re.sub(r"//.*", "", ptx[ptx.index("{\n", ptx.index(".entry")) + 2 :])
    depth = 1
    for end, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            lines = (line.strip() for line in text[:end].splitlines())
            return [line for line in lines if line and not line.startswith((".loc", ".pragma"))]
    raise ValueError("the kernel does not end")


def _get(b: Block, operand: Any, kind: str) -> Array:
    """Value of an operand as `kind`."""
    if isinstance(operand, list):
        # Half of a pair may never have been written: then nothing is to show of it.
        written = [x if isinstance(x, int) or x in b.registers else -1 for x in operand]
        parts = [_get(b, x, "b16" if kind.endswith("32") else "b32") for x in written]
        wide = np.uint32 if kind.endswith("32") else np.uint64
        shift = 16 if wide is np.uint32 else 32
        return (parts[0].astype(wide) | (parts[1].astype(wide) << wide(shift))).view(TYPES[kind])
    if kind == "bf16":
        return _from_bf16(_get(b, operand, "b16"))
    dtype = np.dtype(TYPES[kind])
    if isinstance(operand, int):
        bits = operand & ((1 << 8 * dtype.itemsize) - 1)
        return np.full(b.num_threads, bits, np.dtype(f"u{dtype.itemsize}")).view(dtype)
    value = b.registers[operand]
    if value.dtype.itemsize != dtype.itemsize:
        value = value.astype(np.dtype(f"u{dtype.itemsize}"))
    return value.view(dtype)


def _set(b: Block, target: Any, value: Array) -> None:
    """Writes registers, which hold unsigned bits."""
    if isinstance(target, list):
        half = np.uint16 if value.dtype.itemsize == 4 else np.uint32
        shift = 16 if half is np.uint16 else 32
        bits = value.view(np.dtype(f"u{value.dtype.itemsize}"))
        b.registers[target[0]] = bits.astype(half)
        b.registers[target[1]] = (bits >> bits.dtype.type(shift)).astype(half)
        return
    if value.dtype != np.bool_:
        value = value.view(np.dtype(f"u{value.dtype.itemsize}"))
    b.registers[target] = value


def _address(b: Block, operand: Any) -> Array:
    return b.registers[operand[1]].astype(np.int64) + operand[2]


def _width(opcode: str) -> tuple[int, int]:
    """`(bytes of an element, elements)`."""
    parts = opcode.split(".")
    count = next((int(p[1]) for p in parts if p in ("v2", "v4")), 1)
    return np.dtype(TYPES[parts[-1]]).itemsize, count


def _load(b: Block, opcode: str, operands: list[Any]) -> None:
    width, count = _width(opcode)
    active = getattr(b, "active", None)
    active = np.ones(b.num_threads, np.bool_) if active is None else active
    address = _address(b, operands[1])
    targets = operands[0] if isinstance(operands[0], list) else [operands[0]]
    if "shared" in opcode:
        source, offset = b.shared, address[active]
        assert (offset + width * count <= source.size).all() and (offset % (width * count) == 0).all()
    else:
        source, offset = b.memory.bytes, b.memory.index(address[active], width * count)
    for i, target in enumerate(targets):
        value = np.zeros(b.num_threads, f"u{width}")
        value[active] = source.view(f"u{width}")[offset // width + i] if source.size % width == 0 else 0
        wide = value.astype(np.uint16) if width == 1 else value
        if opcode.endswith(("s8", "s16")):
            wide = value.view(f"i{width}").astype(np.int32).view(np.uint32)
        b.registers[target] = wide


def _store(b: Block, opcode: str, operands: list[Any], active: Array) -> None:
    width, count = _width(opcode)
    address = _address(b, operands[0])[active]
    if "shared" in opcode:
        target, offset = b.shared, address
        assert (offset + width * count <= target.size).all() and (offset % (width * count) == 0).all()
    else:
        target, offset = b.memory.bytes, b.memory.index(address, width * count)
    values = operands[1] if isinstance(operands[1], list) else [operands[1]]
    for i, value in enumerate(values):
        bits = _get(b, value, {1: "b16", 2: "b16", 4: "b32", 8: "b64"}[width])[active]
        target.view(f"u{width}")[offset // width + i] = bits.astype(f"u{width}")


def _async_copy(opcode: str, operands: list[Any]) -> Step:
    if "commit_group" in opcode:

        def commit(b: Block) -> None:
            b.groups.append(b.group)
            b.group = []

        return commit
    if "wait_group" in opcode:
        return lambda b: b.wait(operands[0])
    if "wait_all" in opcode:
        return lambda b: b.wait(0)

    def copy(b: Block) -> None:
        active = getattr(b, "active", None)
        active = np.ones(b.num_threads, np.bool_) if active is None else active
        target, source, size = _address(b, operands[0])[active], _address(b, operands[1])[active], operands[2]
        count = np.full(target.size, size)
        if len(operands) > 3:
            count = _get(b, operands[3], "b32").astype(np.int64)[active] * np.ones(target.size, np.int64)
        real = count > 0
        offset = np.zeros(target.size, np.int64)
        offset[real] = b.memory.index(source[real], size)
        data = np.where(real[:, None], b.memory.bytes[offset[:, None] + np.arange(size)], 0)
        assert (target % size == 0).all() and (target + size <= b.shared.size).all()

        def land() -> None:
            b.shared[target[:, None] + np.arange(size)] = data

        if b.eager:
            land()
        else:
            b.group.append(land)

    return copy


def _f32(x: Array) -> Array:
    return x.astype(np.float32)


def _arithmetic(function: Callable[..., Array]) -> Callable[..., Array]:
    def compute(b: Block, parts: list[str], kinds: list[str], operands: list[Any]) -> Array:
        if kinds[-1] in ("f16x2", "f32x2"):
            whole, half = ("b32", np.float16) if kinds[-1] == "f16x2" else ("b64", np.float32)
            halves = [_get(b, x, whole).view(half).reshape(-1, 2) for x in operands]
            with np.errstate(invalid="ignore"):
                result = function(*halves)
            return np.ascontiguousarray(result.astype(half)).view(TYPES[whole]).reshape(-1)
        if kinds[-1] == "bf16x2":
            halves = [_from_bf16(_get(b, x, "b32").view(np.uint16)) for x in operands]
            return _bf16(function(*halves)).view(np.uint32)
        # As in add.f32.f16, of whose operands the last is float32.
        types = [kinds[-1]] * (len(operands) - 1) + [kinds[0]]
        values = [_get(b, x, kind) for x, kind in zip(operands, types)]
        if types[0] != types[-1]:
            values = [value.astype(np.float32) for value in values]
        with np.errstate(invalid="ignore"):
            result = function(*values)
        return result.astype(values[0].dtype)

    return compute


def _multiply(b: Block, parts: list[str], kinds: list[str], operands: list[Any]) -> Array:
    kind = kinds[-1]
    if kind in ("f32", "f16x2", "f16", "f32x2"):
        return _arithmetic(np.multiply)(b, parts, kinds, operands)
    x, y = (_get(b, o, kind) for o in operands[:2])
    wide = {"s32": np.int64, "u32": np.uint64, "b32": np.uint64, "s16": np.int32, "u16": np.uint32}
    add = None
    if "wide" in parts:
        result = x.astype(wide[kind]) * y.astype(wide[kind])
        add = {4: "b32", 8: "b64"}[result.dtype.itemsize]
    elif "hi" in parts:
        bits = wide[kind](8 * x.dtype.itemsize)
        result = ((x.astype(wide[kind]) * y.astype(wide[kind])) >> bits).astype(x.dtype)
    else:
        result = x * y
    if len(operands) == 3:
        addend = _get(b, operands[2], add or kind)
        result = result + addend.view(result.dtype)
    return result


def _fma(x: Array, y: Array, z: Array) -> Array:
    return _f32(x.astype(np.float64) * y.astype(np.float64) + z.astype(np.float64))


def _shift(b: Block, parts: list[str], kinds: list[str], operands: list[Any]) -> Array:
    x = _get(b, operands[0], kinds[-1])
    bits = 8 * x.dtype.itemsize
    amount = _get(b, operands[1], "b32").astype(np.int64)
    inside = np.minimum(amount, bits - 1).astype(x.dtype)
    if parts[0] == "shl":
        return np.where(amount < bits, x << inside, 0).astype(x.dtype)
    if kinds[-1].startswith("s"):
        return x >> inside
    return np.where(amount < bits, x >> inside, 0).astype(x.dtype)


def _compare(b: Block, parts: list[str], kinds: list[str], operands: list[Any]) -> Array:
    return COMPARE[parts[1]](_get(b, operands[0], kinds[-1]), _get(b, operands[1], kinds[-1]))


def _select(b: Block, parts: list[str], kinds: list[str], operands: list[Any]) -> Array:
    return np.where(b.registers[operands[2]], _get(b, operands[0], kinds[-1]), _get(b, operands[1], kinds[-1]))


def _minmax(function: Callable[..., Array]) -> Callable[..., Array]:
    def compute(b: Block, parts: list[str], kinds: list[str], operands: list[Any]) -> Array:
        choose = (np.fmax if function is np.maximum else np.fmin) if kinds[-1] == "f32" else function
        result = reduce(choose, (_get(b, o, kinds[-1]) for o in operands))
        return np.maximum(result, 0) if "relu" in parts else result

    return compute


def _divide(b: Block, parts: list[str], kinds: list[str], operands: list[Any]) -> Array:
    x, y = (_get(b, o, kinds[-1]) for o in operands)
    if kinds[-1] == "f32":
        return x / y
    safe = np.where(y == 0, 1, y)
    quotient = np.trunc(x.astype(np.float64) / safe.astype(np.float64)).astype(x.dtype)
    return quotient if parts[0] == "div" else x - quotient * safe


def e4m3(bits: Array) -> Array:
    """float32 values of e4m3fn bits."""
    magnitude = (bits & 127).astype(np.uint32)
    value = np.where(
        magnitude < 8, magnitude * 2.0**-9, ((magnitude << 20) + (120 << 23)).astype(np.uint32).view(np.float32)
    )
    value = np.where(magnitude == 127, np.nan, value)
    return _f32(np.where(bits >> 7, -value, value))


def _bf16(x: Array) -> Array:
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _from_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _convert(b: Block, parts: list[str], kinds: list[str], operands: list[Any]) -> Array:
    target, source = kinds[-2:]
    if (target, source) == ("f16x2", "e4m3x2"):
        bits = _get(b, operands[0], "b16")
        halves = np.stack([e4m3(bits & np.uint16(255)), e4m3(bits >> np.uint16(8))], -1).astype(np.float16)
        return halves.view(np.uint32).reshape(-1)
    if target in ("f16x2", "bf16x2") and source == "f32":
        high, low = (_get(b, o, "f32") for o in operands)
        pairs = np.stack([low, high], -1)
        narrow = pairs.astype(np.float16) if target == "f16x2" else _bf16(pairs)
        return narrow.view(np.uint32).reshape(-1)
    if source == "bf16":
        return _from_bf16(_get(b, operands[0], "b16"))
    if target == "bf16":
        return _bf16(_get(b, operands[0], "f32"))
    value = _get(b, operands[0], source)
    if "rpi" in parts:
        return np.ceil(value)
    if target.startswith("f") or source.startswith("f"):
        with np.errstate(over="ignore", invalid="ignore"):
            return value.astype(TYPES[target])
    result = value.astype(TYPES[target])
    return result.astype(np.int16 if target == "s8" else np.uint16) if result.dtype.itemsize == 1 else result


def _permute(b: Block, parts: list[str], kinds: list[str], operands: list[Any]) -> Array:
    pair = np.stack([_get(b, o, "b32") for o in operands[:2]], -1).view(np.uint8).reshape(-1, 8)
    selector = _get(b, operands[2], "b32")
    result = np.zeros((b.num_threads, 4), np.uint8)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & np.uint32(15)
        byte = np.take_along_axis(pair, (nibble & 7).astype(np.int64)[:, None], 1)[:, 0]
        result[:, i] = np.where(nibble & 8, np.where(byte & 128, 255, 0), byte)
    return result.view(np.uint32).reshape(-1)


def _lop3(b: Block, parts: list[str], kinds: list[str], operands: list[Any]) -> Array:
    x, y, z = (_get(b, o, "b32") for o in operands[:3])
    result = np.zeros(b.num_threads, np.uint32)
    for i in range(8):
        if operands[3] >> i & 1:
            result |= (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
    return result


def _extract(b: Block, parts: list[str], kinds: list[str], operands: list[Any]) -> Array:
    x, start, size = (_get(b, o, "b32").astype(np.int64) for o in operands)
    field = (x >> start) & ((1 << size) - 1)
    if kinds[-1] == "s32":
        field -= (field >> (size - 1)) << size
    return field.astype(np.int32)


def _unary(function: Callable[[Array], Array]) -> Callable[..., Array]:
    def compute(b: Block, parts: list[str], kinds: list[str], operands: list[Any]) -> Array:
        if kinds[-1] == "pred":
            return ~b.registers[operands[0]]
        with np.errstate(all="ignore"):
            value = _get(b, operands[0], kinds[-1])
            return function(value).astype(value.dtype)

    return compute


def _logic(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda b, parts, kinds, operands: function(*(_get(b, o, kinds[-1]) for o in operands))


def _move(b: Block, parts: list[str], kinds: list[str], operands: list[Any]) -> Array:
    kind = kinds[-1]
    return _get(b, operands[0], kind if kind != "f32" else "b32")


COMPUTE: dict[str, Callable[..., Array]] = {
    "mov": _move,
    "add": _arithmetic(np.add),
    "sub": _arithmetic(np.subtract),
    "mul": _multiply,
    "mad": _multiply,
    "fma": _arithmetic(_fma),
    "shl": _shift,
    "shr": _shift,
    "and": _logic(np.bitwise_and),
    "or": _logic(np.bitwise_or),
    "xor": _logic(np.bitwise_xor),
    "not": _unary(np.invert),
    "neg": _unary(np.negative),
    "abs": _unary(np.abs),
    "popc": _unary(lambda x: np.bitwise_count(x).astype(x.dtype)),
    "setp": _compare,
    "selp": _select,
    "min": _minmax(np.minimum),
    "max": _minmax(np.maximum),
    "div": _divide,
    "rem": _divide,
    "cvt": _convert,
    "prmt": _permute,
    "lop3": _lop3,
    "bfe": _extract,
    "ex2": _unary(np.exp2),
    "lg2": _unary(np.log2),
    "rcp": _unary(lambda x: 1 / x),
    "cvta": _move,
}


def _fragment(b: Block, operands: Sequence[Any], dtype: Any) -> Array:
    """Registers of each warp as `[warps, lanes, registers, elements]`."""
    found = np.stack([_get(b, o, "b32") for o in operands], -1)
    return found.view(dtype).reshape(-1, 32, len(operands), 4 // np.dtype(dtype).itemsize)


LANE = np.arange(32)


def _mma(b: Block, opcode: str, operands: list[Any]) -> None:
    if opcode == "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32":
        a, bb = (_from_bf16(_fragment(b, o, np.uint16)) for o in operands[1:3])
    else:
        assert opcode == "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", opcode
        a, bb = (_fragment(b, o, np.float16).astype(np.float32) for o in operands[1:3])
    c = _fragment(b, operands[3], np.float32)
    g, t = LANE[:, None, None] // 4, LANE[:, None, None] % 4
    r, e = np.arange(4)[None, :, None], np.arange(2)[None, None, :]
    left = np.zeros((a.shape[0], 16, 16), np.float32)
    left[:, g + 8 * (r % 2), 2 * t + e + 8 * (r // 2)] = a
    right = np.zeros((a.shape[0], 16, 8), np.float32)
    right[:, 2 * t + e + 8 * r[:, :2], g + 0 * e] = bb
    out = np.zeros((a.shape[0], 16, 8), np.float32)
    rows, columns = LANE[:, None] // 4 + 8 * (np.arange(4) // 2), 2 * (LANE[:, None] % 4) + np.arange(4) % 2
    out[:, rows, columns] = c[..., 0]
    with np.errstate(all="ignore"):
        out = out + left @ right
    for i, target in enumerate(operands[0]):
        _set(b, target, np.ascontiguousarray(out[:, rows[:, i], columns[:, i]]).reshape(-1))


def _transpose(b: Block, opcode: str, operands: list[Any]) -> None:
    assert opcode == "movmatrix.sync.aligned.m8n8.trans.b16", opcode
    matrix = _fragment(b, [operands[1]], np.uint16)[:, :, 0].reshape(-1, 8, 8)
    result = np.ascontiguousarray(matrix.transpose(0, 2, 1)).reshape(-1, 2)
    _set(b, operands[0], result.view(np.uint32).reshape(-1))


def _shuffle(b: Block, opcode: str, operands: list[Any]) -> None:
    value = _get(b, operands[1], "b32").reshape(-1, 32)
    amount = _get(b, operands[2], "b32").reshape(-1, 32).astype(np.int64)
    source = LANE ^ amount if "bfly" in opcode else amount % 32
    _set(b, operands[0].split("|")[0], np.take_along_axis(value, source, 1).reshape(-1))


def _matrix_rows(b: Block, opcode: str, address: Any) -> tuple[Array, int]:
    """Byte offsets `[warps, matrices, 8 rows]` of `ldmatrix` and `stmatrix`."""
    count = int(re.search(r"\.x(\d)", opcode)[1])  # type: ignore[index]
    return _address(b, address).reshape(-1, 32)[:, : 8 * count].reshape(-1, count, 8), count


def _load_matrix(b: Block, opcode: str, operands: list[Any]) -> None:
    targets = operands[0] if isinstance(operands[0], list) else [operands[0]]
    if ".m16n16." in opcode:
        # Bytes, transposed; of the result a register has the upper or the lower half.
        rows = _address(b, operands[1]).reshape(-1, 2, 16)[:, : len(targets) // 2]
        matrices = b.shared[rows[..., None] + np.arange(16)].swapaxes(-1, -2)
        for i, target in enumerate(targets):
            half = matrices[:, i // 2, i % 2 * 8 : i % 2 * 8 + 8]
            _set(b, target, half.reshape(-1, 4).copy().view(np.uint32).reshape(-1))
        return
    rows, count = _matrix_rows(b, opcode, operands[1])
    matrices = b.shared[rows[..., None] + np.arange(16)].view(np.uint16)
    if ".trans" in opcode:
        matrices = matrices.swapaxes(-1, -2)
    for i in range(count):
        values = np.ascontiguousarray(matrices[:, i]).reshape(-1, 2).view(np.uint32)
        _set(b, targets[i], values.reshape(-1))


def _store_matrix(b: Block, opcode: str, operands: list[Any]) -> None:
    rows, count = _matrix_rows(b, opcode, operands[0])
    values = operands[1] if isinstance(operands[1], list) else [operands[1]]
    for i in range(count):
        matrix = _fragment(b, [values[i]], np.uint16)[:, :, 0].reshape(-1, 8, 8)
        if ".trans" in opcode:
            matrix = matrix.swapaxes(-1, -2)
        b.shared[rows[:, i, :, None] + np.arange(16)] = np.ascontiguousarray(matrix).view(np.uint8)


SPECIAL: dict[str, Callable[[Block, str, list[Any]], None]] = {
    "mma": _mma,
    "movmatrix": _transpose,
    "shfl": _shuffle,
    "ldmatrix": _load_matrix,
    "stmatrix": _store_matrix,
}


def _runtime(kind: Any, value: Any) -> Iterator[Any]:
    """Of an argument, which may be a tuple, what the compiled kernel takes."""
    if isinstance(kind, tuple):
        for part in zip(kind, value, strict=True):
            yield from _runtime(*part)
    elif kind != "constexpr":
        yield value


@contextlib.contextmanager
def launches(capability: int = 90, eager: bool = False) -> Iterator[list[str]]:
    """Within it, Triton launches run here, compiled for sm_`capability`; yields the names of the kernels that ran."""
    from triton.runtime.jit import JITFunction

    names: list[str] = []
    programs: dict[int, Program] = {}
    with offline.launches(capability):
        compile_only = JITFunction.run

        def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            kernel = compile_only(self, *args, grid=grid, warmup=True, **kwargs)
            names.append(self.fn.__name__)
            given = dict(zip(self.arg_names, args)) | kwargs
            memory = Memory()
            values = [
                memory.place(value) if isinstance(value, Tensor) else value
                for name, kind in kernel.src.signature.items()
                for value in _runtime(kind, given[name])
            ]
            key = id(kernel)
            if key not in programs:
                programs[key] = Program(kernel.asm["ptx"], 32 * kernel.metadata.num_warps, kernel.metadata.shared)
            memory.load()
            sizes = (*grid, 1, 1)[:3]
            for block in itertools.product(*map(range, reversed(sizes))):
                programs[key].run(memory, values, sizes, block[::-1], eager)
            memory.store()
            return kernel

        no_guard = mock.patch("torch.cuda.device", lambda _: contextlib.nullcontext())
        this_gpu = mock.patch("torch.cuda.get_device_capability", lambda *_: divmod(capability, 10))
        with mock.patch.object(JITFunction, "run", run), no_guard, this_gpu:
            yield names
