"""Chunked prefill over an NVFP4 history: error against float64 first, then time beside SDPA in one run.

    python benchmarks/prefill.py [results.csv]

The peers read BF16 keys and values that are already in place, history and new tokens in one tensor; ours decodes the
history and takes the new tokens from where the model wrote them. FLOPs are those of the visible scores.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from timing import Table, captured, quantiles
from torch import Tensor

from torch_fp4kv.ops.call import AttentionCall
from torch_fp4kv.ops.format import blocks
from torch_fp4kv.ops.kernels import prefill

KV_HEADS, GROUP = 8, 4
PEERS = {
    "SDPA flash BF16": lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0],
    "SDPA cuDNN BF16, no causal mask": lambda q, k, v: torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, False, 0.0, False
    )[0],
}


def history_and_chunk(head_dim: int, history: int, chunk: int, exact: bool) -> tuple[AttentionCall, Tensor, Tensor]:
    """A call in bf16, batch 1, and the same keys and values in BF16 `[1, H, history + chunk, D]`."""
    torch.manual_seed(0)
    capacity = history + chunk
    g = torch.tensor(0.01, device="cuda")
    stored, full = [], []
    for _ in range(2):
        words = torch.empty(1, KV_HEADS, capacity, head_dim // 16, dtype=torch.int64, device="cuda")
        scales = torch.empty(words.shape, dtype=torch.uint8, device="cuda")
        words[:, :, :history], scales[:, :, :history] = blocks.encode(
            torch.randn(1, KV_HEADS, history, head_dim, device="cuda"), g
        )
        stored += [words, scales]
        past = blocks.decode(words[:, :, :history], scales[:, :, :history], g).bfloat16()
        new = torch.randn(1, KV_HEADS, chunk, head_dim, device="cuda").bfloat16()
        full.append(torch.cat([past, new], 2))
    options = {}
    if exact:
        options["exact_from"] = torch.tensor([history - 64], dtype=torch.int32, device="cuda")
        options["num_sink_tokens"] = 4
        p = torch.cat([torch.arange(4), 4 + torch.arange(history - 64, history) % 80]).cuda()
        source = torch.cat([torch.arange(4), torch.arange(history - 64, history)]).cuda()
        for name, x in (("k_exact", full[0]), ("v_exact", full[1])):
            options[name] = torch.zeros(1, KV_HEADS, 4 + 80 + 1, head_dim, device="cuda", dtype=torch.bfloat16)
            options[name][:, :, p] = x[:, :, source]
    q = torch.randn(1, KV_HEADS * GROUP, chunk, head_dim, device="cuda").bfloat16()
    lengths = torch.tensor([capacity], dtype=torch.int32, device="cuda")
    k_new, v_new = (x[:, :, history:] for x in full)
    return AttentionCall(q, *stored, g, g, lengths, k_new=k_new, v_new=v_new, **options), *full


def error(out: Tensor, call: AttentionCall, k: Tensor, v: Tensor) -> float:
    """Relative error of the last 32 queries against float64."""
    length = k.shape[2]
    q = call.q[:, :, -32:].double()
    scores = q @ k.double().repeat_interleave(GROUP, 1).transpose(2, 3) * call.softmax_scale
    own = torch.arange(length - 32, length, device="cuda")[:, None]
    scores = scores.masked_fill(torch.arange(length, device="cuda") > own, -torch.inf)
    expected = scores.softmax(-1) @ v.double().repeat_interleave(GROUP, 1)
    return float((out[:, :, -32:] - expected).norm() / expected.norm())


def main() -> None:
    table = Table("prefill")
    for head_dim, history, chunk, exact in (
        (128, 32768, 2048, False),
        (128, 32768, 2048, True),
        (128, 8192, 2048, False),
        (128, 131072, 2048, False),
        (128, 32768, 512, False),
        (128, 32768, 128, False),
        (128, 32768, 32, False),
        (64, 32768, 2048, False),
        (256, 32768, 2048, False),
    ):
        call, k, v = history_and_chunk(head_dim, history, chunk, exact)
        ours_error = error(prefill.run(call)[0], call, k, v)
        assert ours_error < 5e-3, ours_error
        case = f"D {head_dim}, {chunk} over {history}" + (", exact window" if exact else "")
        flops = 4 * KV_HEADS * GROUP * head_dim * (chunk * history + chunk * (chunk + 1) / 2)
        ours = captured(lambda call=call: prefill.run(call), 5)
        eager = quantiles(lambda call=call: prefill.run(call))
        flash = None
        for name, peer in PEERS.items():
            if "flash" in name:
                keys, values = k, v
            else:
                keys, values = k.repeat_interleave(GROUP, 1), v.repeat_interleave(GROUP, 1)
            times = captured(lambda: peer(call.q, keys, values), 5)  # noqa: B023
            flash = flash or times[0]
            table.add(
                case,
                name,
                times,
                tflop_per_s=flops / times[0] / 1e9,
                speed_of_flash=flash / times[0],
                error=error(peer(call.q, keys, values), call, k, v) if "flash" in name else "",
            )
        table.add(
            case, "NVFP4", ours, tflop_per_s=flops / ours[0] / 1e9, speed_of_flash=flash / ours[0], error=ours_error
        )
        table.add(case, "NVFP4, launched eagerly", eager, speed_of_flash=flash / eager[0])
    table.write(Path(sys.argv[1]) if len(sys.argv) > 1 else None)


if __name__ == "__main__":
    main()
