"""`torch-fp4kv doctor`: versions, devices, which backend serves each op here, and why the others do not."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from . import __version__, lowering, ops
from .console import heading, table
from .ops import backends
from .ops.flashinfer import support as flashinfer

PACKAGES = ("torch", "triton", "transformers", "flashinfer-python")

SUPPORTED = {"torch": ((2, 11), (2, 15)), "transformers": ((5, 17), (5, 24)), "triton": ((3, 6), (3, 7))}
"""First and last minor version that this release was written for."""


@dataclass(frozen=True)
class Backend:
    """What serves `op` on a device ("" if nothing does), and what was passed over, with the reason."""

    op: str
    serves: str
    passed_over: dict[str, str]


@dataclass(frozen=True)
class Device:
    """A device, the backend of each op on it, and whether a small round trip gave the right values.

    Attributes:
        problem: why the device is of no use; None if it is.
        compile: why `torch.compile` cannot make code for it; None if it can.
    """

    device: str
    name: str
    backends: list[Backend]
    problem: str | None
    compile: str | None


@dataclass(frozen=True)
class Report:
    """All that `doctor` knows. `notes` are things to know that stop nothing."""

    versions: dict[str, str | None]
    devices: list[Device]
    lowerings: str
    links: str
    notes: list[str]

    @property
    def usable(self) -> bool:
        return any(device.problem is None for device in self.devices)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Prints the report; 0 if there is a device on which the ops give the right values, else 1."""
    report = examine()
    if args.json:
        print(json.dumps({**asdict(report), "usable": report.usable}, indent=2))
    else:
        _print(report)
    return 0 if report.usable else 1


def examine() -> Report:
    """Looks at this machine; runs a few small calls on each device."""
    versions = {"python": platform.python_version(), "torch-fp4kv": __version__, **{p: version(p) for p in PACKAGES}}
    # The metadata of PyPI's wheels does not say which build it is.
    versions["torch"] = torch.__version__
    devices = [torch.device("cpu")]
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        devices += [torch.device(kind, i) for i in range(module.device_count() if module.is_available() else 0)]
    return Report(
        versions=versions,
        devices=[_device(device) for device in devices],
        lowerings=_lowerings(),
        links=links(Path(__file__).parents[1]),
        notes=[*_notes(versions), *_flashinfer_notes(devices)],
    )


def version(package: str) -> str | None:
    """The installed version of `package`, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def compiler_missing(device: torch.device) -> str | None:
    """Why `torch.compile` cannot generate code for `device`, or None."""
    if device.type != "cpu":
        return backends.triton_missing(device)
    # Inductor's choice: it tries no other.
    name = os.environ.get("CXX", {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++"))
    if shutil.which(name):
        return None
    return f"torch.compile on the CPU needs a C++ compiler, and {name} is not on PATH; CXX= names another"


def links(root: Path) -> str:
    """Whether the checkout's root links lead into the package: "ok", what is wrong, or that there is no checkout."""
    if not (root / "pyproject.toml").exists() or not (root / "torch_fp4kv").is_dir():
        return "installed package, no checkout"
    for name in ("ops", "lowering"):
        if not (root / name / "__init__.py").is_file() or not (root / name).samefile(root / "torch_fp4kv" / name):
            return (
                f"{name} at the root is no link to torch_fp4kv/{name}; the package works without it "
                "(on Windows: git config core.symlinks true, then check out again)"
            )
    return "ok"


def _device(device: torch.device) -> Device:
    name = cpu_name() if device.type == "cpu" else str(getattr(torch, device.type).get_device_name(device))
    if device.type == "cuda" and torch.version.hip is None:
        name += " (compute capability {}.{})".format(*torch.cuda.get_device_capability(device))
    choices = [(op, backends.explain_device(op, device)) for op in backends.OPS]
    return Device(
        device=str(device),
        name=name,
        backends=[Backend(op, choice.name, choice.passed_over) for op, choice in choices],
        problem=_problem(device),
        compile=compiler_missing(device),
    )


def _problem(device: torch.device) -> str | None:
    """Stores a little K and V and attends to it; None if bytes and values are those of the CPU's PyTorch bodies."""
    try:
        words, scales, out = _round_trip(device)
        want_words, want_scales, want_out = _round_trip(torch.device("cpu"), backend="torch")
    except Exception as error:
        # Whatever a driver or compiler raises is what the user came to see.
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if not (torch.equal(words, want_words) and torch.equal(scales, want_scales)):
        return "append wrote other bytes than the reference"
    worst = float((out - want_out).abs().max())
    if not worst < 1e-2:  # NaN too
        return f"attention is off by {worst:.2g}"
    name = backends.explain_device("attention", device).name
    return _flashinfer_problem(device, name) if name in flashinfer.KERNELS else None


def _flashinfer_problem(device: torch.device, name: str) -> str | None:
    """As `_problem` for FlashInfer's kernel `name`; what keeps FlashInfer from running is one too."""
    try:
        have = _paged_round_trip(device, name, flashinfer.KERNELS[name].v_scale_layout)
        want = _paged_round_trip(torch.device("cpu"), "torch", flashinfer.KERNELS[name].v_scale_layout)
    except Exception as error:
        return f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    off = float((have - want).norm() / want.norm())
    return None if off < 2 * flashinfer.KERNELS[name].error else f"{name} is off by {off:.2g} of the values"


def _paged_round_trip(device: torch.device, backend: str, v_scale_layout: str) -> torch.Tensor:
    """float32 output of a bfloat16 query over 50 tokens in pages of 16, the later pages first."""
    generator = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(1, heads, 50, 128, generator=generator).bfloat16() for heads in (2, 2, 8))
    k, v, q = k.to(device), v.to(device), q[:, :, -1:].to(device)
    storage = [torch.zeros(4, 2, 16, 8, dtype=t, device=device) for t in (torch.int64, torch.uint8) * 2]
    table = torch.arange(3, -1, -1, dtype=torch.int32, device=device)[None]
    position = torch.arange(50, device=device)
    slots = table[0].long()[position // 16] * 16 + position % 16
    k_global, v_global = (torch.tensor(scales, device=device) for scales in ([0.02, 0.03], [0.05, 0.017]))
    ops.append(*(*storage, k, v, slots[None], k_global, v_global), v_scale_layout=v_scale_layout)
    lengths = torch.full((1,), 50, dtype=torch.int32, device=device)
    out: torch.Tensor = ops.attention(
        *(q, *storage, k_global, v_global, lengths),
        block_table=table,
        v_scale_layout=v_scale_layout,
        backend=backend,
    )
    return out.float().cpu()


def _round_trip(device: torch.device, backend: str = "auto") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Words, scales and output of one query over 5 tokens, in a cache that every kernel takes."""
    generator = torch.Generator().manual_seed(0)
    k, v, q = (torch.randn(1, heads, 5, 64, generator=generator) for heads in (2, 2, 4))
    k, v, q = k.to(device), v.to(device), q[:, :, -1:].to(device)
    words = [torch.zeros(1, 2, 128, 4, dtype=torch.int64, device=device) for _ in range(2)]
    scales = [torch.zeros(1, 2, 128, 4, dtype=torch.uint8, device=device) for _ in range(2)]
    one = torch.full((), 2.0**-6, device=device)
    slots = torch.arange(5, device=device)[None]
    stored = (words[0], scales[0], words[1], scales[1])
    ops.append(*stored, k, v, slots, one, one, backend=backend)
    lengths = torch.full((1,), 5, dtype=torch.int32, device=device)
    out = ops.attention(q, *stored, one, one, lengths, backend=backend)
    return torch.cat(words).cpu(), torch.cat(scales).cpu(), out.cpu()


def _lowerings() -> str:
    try:
        lowering.register()
    except Exception as error:
        # A private interface of another torch version is what this line is for.
        return f"not with this torch: {type(error).__name__}: {error}"
    return f"registered with Inductor for {', '.join(lowering.registry.LOWERED)}"


def _notes(versions: dict[str, str | None]) -> list[str]:
    notes = []
    for package, (first, last) in SUPPORTED.items():
        found = versions[package]
        if found is None:
            continue
        minor = tuple(int(part) for part in found.split(".")[:2])
        if not first <= minor <= last:
            low, high = (".".join(map(str, v)) for v in (first, last))
            notes.append(f"{package} {found} is outside the versions this release was written for, {low} to {high}")
    if versions["transformers"] is None:
        notes.append("NVFP4Cache needs transformers: pip install 'torch-fp4kv[hf]'")
    return notes


def _flashinfer_notes(devices: list[torch.device]) -> list[str]:
    if flashinfer.version() is None:
        return []
    how = "fast math (torch_fp4kv.exact_math() ends that)"
    if os.environ.get(flashinfer.FAST_MATH_OFF) == "1":
        how = f"exact math ({flashinfer.FAST_MATH_OFF}=1)"
    elif os.environ.get(flashinfer.FAST_MATH_OFF_CUDA) == "1":
        how = f"exact math with backend='cuda' ({flashinfer.FAST_MATH_OFF_CUDA}=1), fast math with 'cute-dsl'"
    notes = [f"FlashInfer's quantisers, used by name only, use {how}"]
    for device in devices:
        name = backends.explain_device("attention", device).name
        if name == "flashinfer-trtllm-gen":
            notes.append(
                f"{device}: {name} serves pools made with PagedNVFP4Cache(v_scale_layout='4token') and a recipe "
                "without an exact window; its query and output are E4M3"
            )
        if name in flashinfer.KERNELS:
            notes.append(
                f"{device}: caches with an exact window (the default recipe) and prefills are served by our own "
                "kernels: FlashInfer's XQA has no log-sum-exp to join two parts with, trtllm-gen's output is E4M3"
            )
        able = [n for n in flashinfer.JOINS_EXACT if flashinfer.attention_missing(n, device) is None]
        if able:
            notes.append(
                f"{device}: decode over an exact window in a paged cache goes by name to {' or '.join(able)} too"
            )
    return notes


def _print(report: Report) -> None:
    heading("Versions")
    for name, found in report.versions.items():
        print(f"{name:18} {found or 'not installed'}")
    for device in report.devices:
        heading(f"{device.device}: {device.name}")
        table([("op", "served by"), *[(b.op, b.serves) for b in device.backends]])
        for (name, reason), for_ops in _reasons(device).items():
            print(f"not {name} ({', '.join(for_ops)}): {reason}")
        print(f"torch.compile: {device.compile or 'can generate code'}")
        print(f"round trip: {device.problem or 'right values'}")
    heading("Package")
    print(f"lowerings: {report.lowerings}")
    print(f"links at the root: {report.links}")
    for note in report.notes:
        print(f"note: {note}")
    print("\nusable" if report.usable else "\nnot usable: no device gave the right values")


def _reasons(device: Device) -> dict[tuple[str, str], list[str]]:
    """The ops for which a backend was passed over, by backend and reason."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for choice in device.backends:
        for passed_over in choice.passed_over.items():
            reasons.setdefault(passed_over, []).append(choice.op)
    return reasons
