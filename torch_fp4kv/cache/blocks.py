"""The message of a hand-over between machines: a JSON header and one contiguous run of bytes, sent point to point."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FORMAT = "torch_fp4kv.blocks"
VERSION = 2

_MAGIC = 0x6670346B76_0001
_WORD = 8
# Words that a checksum takes at a time, so that its scratch stays small beside the payload.
_CHUNK = 1 << 22


@dataclass(frozen=True)
class Blocks:
    """Tokens of some rows of a cache on the way to another; made by `export_blocks`, taken by `import_blocks`.

    Attributes:
        header: what the payload holds and where it belongs; see docs/format.md.
        payload: uint8 `[n]`, the tensors one after the other, each from a multiple of 8 bytes.
    """

    header: dict[str, Any]
    payload: Tensor

    @classmethod
    def pack(cls, header: dict[str, Any], tensors: dict[str, Tensor]) -> Blocks:
        """The message of `header` and `tensors`, with checksums of both, on the device of the first."""
        pieces, device = [], next(iter(tensors.values())).device
        for tensor in tensors.values():
            raw = tensor.to(device).contiguous().flatten().view(torch.uint8)
            pieces += [raw, raw.new_zeros(-raw.numel() % _WORD)]
        payload = torch.cat(pieces)
        described = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]
        full = {"format": FORMAT, "version": VERSION, **header, "tensors": described, "checksum": _checksum(payload)}
        return cls({**full, "sha256": _digest(full)}, payload)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, views of the payload.

        Raises:
            ValueError: header or payload is not what was packed, or of another version.
        """
        header = dict(self.header)
        if header.get("format") != FORMAT:
            raise ValueError(f"not blocks of a cache: the header's format is {header.get('format')!r}, not {FORMAT!r}")
        if header.get("version") != VERSION:
            raise ValueError(f"blocks of version {header.get('version')}; this package reads version {VERSION}")
        altered = f"blocks of {header.get('transfer')!r} were altered: "
        if header.pop("sha256", None) != _digest(header):
            raise ValueError(altered + "their header does not have the checksum it left with")
        sizes = [math.prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape in header["tensors"]]
        nbytes, payload = sum(size + -size % _WORD for size in sizes), self.payload
        if payload.dtype != torch.uint8 or list(payload.shape) != [nbytes]:
            raise ValueError(altered + f"a payload of uint8 [{nbytes}] is {payload.dtype} {list(payload.shape)}")
        if payload.storage_offset() % _WORD:
            payload = payload.clone()
        if header["checksum"] != _checksum(payload):
            raise ValueError(altered + "their payload does not have the checksum it left with")
        found, at = {}, 0
        for (name, dtype, shape), size in zip(header["tensors"], sizes):
            found[name] = payload[at : at + size].view(getattr(torch, dtype)).view(shape)
            at += size + -size % _WORD
        return found

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return 3 * _WORD + len(json.dumps(self.header)) + self.payload.numel()

    def send(self, dst: int, group: dist.ProcessGroup | None = None) -> None:
        """Sends to rank `dst` and waits until the buffers may be used again. NCCL sends tensors on the GPU only: there
        the cache must be on it."""
        device = self.payload.device
        header = torch.frombuffer(bytearray(json.dumps(self.header).encode()), dtype=torch.uint8).to(device)
        sizes = torch.tensor([_MAGIC, header.numel(), self.payload.numel()], device=device)
        for tensor in (sizes, header, self.payload):
            dist.send(tensor, dst, group=group)

    @classmethod
    def receive(
        cls, src: int, group: dist.ProcessGroup | None = None, device: torch.device | str | None = None
    ) -> Blocks:
        """Waits for what rank `src` sends with `send`.

        Args:
            device: where the payload goes; default the CPU. With NCCL a GPU.

        Raises:
            ValueError: something else was sent.
        """
        sizes = torch.empty(3, dtype=torch.int64, device=device)
        dist.recv(sizes, src, group=group)
        magic, header_bytes, payload_bytes = sizes.tolist()
        if magic != _MAGIC:
            raise ValueError(f"rank {src} sent something else than blocks of a cache")
        header = torch.empty(header_bytes, dtype=torch.uint8, device=device)
        payload = torch.empty(payload_bytes, dtype=torch.uint8, device=device)
        for tensor in (header, payload):
            dist.recv(tensor, src, group=group)
        return cls(json.loads(bytes(header.tolist())), payload)


def _digest(header: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(header, sort_keys=True).encode()).hexdigest()


def _checksum(payload: Tensor) -> int:
    """Sum of the payload's words, each times an odd number that depends on its place, modulo 2^64: on the payload's
    device, and different for any change to one word."""
    words = payload.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=payload.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK]
        place = torch.arange(start, start + part.numel(), device=payload.device)
        # Fibonacci hashing: 2^64 divided by the golden ratio, as a signed number.
        total += (part * ((place * -7046029254386353131) | 1)).sum()
    return int(total)
