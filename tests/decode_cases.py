"""Cases of the decode kernel that a GPU and the emulator of `ptx.py` both run, against the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import calls
import oracle
import torch
from torch import Tensor

from torch_fp4kv.ops.attention import LARGEST_WINDOW
from torch_fp4kv.ops.call import AttentionCall

BIAS = torch.linspace(-0.5, 0.5, 128).repeat(2, 1)

CASES: dict[str, dict[str, Any]] = {
    "one token": {"lengths": (1,)},
    "empty row": {"lengths": (0, 70)},
    "four rows": {"lengths": (700, 64, 65, 128), "capacity": 1024},
    "no group": {"heads": 2},
    "group of 3": {"heads": 6},
    "group of 8": {"heads": 16},
    "group of 16": {"heads": 32},
    "group of 32": {"heads": 64},
    "group of 3, two queries": {"heads": 6, "num_queries": 2},
    "two queries": {"num_queries": 2, "lengths": (90, 2)},
    "five queries": {"num_queries": 5, "lengths": (300, 64)},
    "sixteen queries": {"num_queries": 16, "lengths": (300, 64)},
    "512 columns": {"num_queries": 16, "heads": 64, "lengths": (200,)},
    "padded queries": {"num_queries": 4, "q_lengths": (4, 1, 0), "lengths": (200, 77, 5)},
    "not causal": {"num_queries": 3, "causal": False},
    "left padding": {"starts": (7, 64), "lengths": (150, 130)},
    "window": {"window": 17, "lengths": (300, 9)},
    "window over queries": {"window": 17, "num_queries": 4, "lengths": (300, 20)},
    "largest window, more queries than tokens": {"window": LARGEST_WINDOW, "num_queries": 16, "lengths": (70, 2)},
    "soft-cap": {"softcap": 5.0},
    "ring": {"lengths": (300, 150), "capacity": 128},
    "ring of 16s": {"lengths": (300, 150), "capacity": 80, "num_queries": 2},
    "pages of 16": {"lengths": (300, 70), "capacity": 320, "page_size": 16},
    "pages of 32": {"lengths": (300, 70), "capacity": 320, "page_size": 32},
    "pages of 64": {"lengths": (300, 70), "capacity": 320, "page_size": 64},
    "pages of 256": {"lengths": (300, 70), "capacity": 512, "page_size": 256},
    "exact ring": {"ring": 24, "num_sink_tokens": 4, "starts": (3, 2), "lengths": (300, 90)},
    "long exact ring": {"ring": 130, "num_sink_tokens": 4, "lengths": (300, 90), "num_queries": 3},
    "all exact": {"ring": 64, "lengths": (40, 64)},
    "all exact, in pages": {
        "lengths": (129, 40),
        "starts": (17, 0),
        "ring": 128,
        "num_sink_tokens": 4,
        "page_size": 32,
        "capacity": 512,
        "num_queries": 2,
    },
    "sinks alone": {"num_sink_tokens": 4, "lengths": (300, 3)},
    "exact window, soft-cap": {"ring": 24, "num_sink_tokens": 4, "window": 40, "softcap": 5.0, "lengths": (300, 90)},
    "bias of V": {"head_dim": 128, "v_bias": BIAS, "ring": 24},
    "rotated keys": {"k_rotation": 64, "ring": 24},
    "keys shifted far": {"head_dim": 128, "k_bias": BIAS * 60, "ring": 24},
    "shifted and rotated keys, window": {
        "head_dim": 128,
        "k_bias": BIAS,
        "k_rotation": 128,
        "window": 17,
        "num_queries": 2,
    },
    "transformed keys": {"head_dim": 128, **calls.equalized(2, 128), "ring": 24},
    "transformed keys, group of 16": {"head_dim": 128, **calls.equalized(2, 128), "heads": 32},
    "rotated keys, queries by 16": {"k_rotation": 64, "num_queries": 5},
}
HEAD_SIZES = [
    (64, 64),
    (80, 80),
    (96, 96),
    (128, 128),
    (192, 192),
    (256, 256),
    (192, 128),
    (64, 256),
    (256, 80),
    (96, 64),
]


def call(**options: Any) -> AttentionCall:
    """Two rows of D 128 and what `options` of `calls.make` change, with float32 results, on the CPU."""
    lengths = options.get("lengths", (90, 33))
    capacity = -(-max(*lengths, 1) // 64) * 64
    options = {"lengths": lengths, "capacity": capacity, "head_dim": 128, **options}
    return calls.make(out_dtype=torch.float32, return_lse=True, **options)


def compare(c: AttentionCall, out: Tensor, lse: Tensor | None, tolerance: float = 1e-3) -> None:
    """`out` has a relative error (2-norm) under `tolerance`, `lse` one under 1e-3; unseen queries give 0 and -inf."""
    assert lse is not None
    expected, expected_lse = oracle.attend(c)
    assert torch.isfinite(out).all()
    assert float((out - expected).norm()) <= tolerance * float(expected.norm())
    unseen = expected_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, unseen)
    assert torch.all(out[unseen] == 0)
    assert float((lse - expected_lse)[~unseen].abs().max() if (~unseen).any() else 0.0) < 1e-3


def check_hidden_by_the_lowest_number(
    c: AttentionCall, run: Callable[[AttentionCall], tuple[Tensor, Tensor | None]]
) -> None:
    """Queries after the first, whose keys a mask all hides by its dtype's lowest number, get the mean of the values."""
    for dtype in (torch.float32, torch.bfloat16):
        mask = torch.zeros(c.q.shape[0], 1, c.q.shape[2], int(c.lengths.max()), dtype=dtype)
        mask[:, :, 1:] = torch.finfo(dtype).min
        mask[..., 9] = torch.finfo(dtype).min
        mask[..., 7] = -torch.inf
        hidden = replace(c, mask=mask)
        out, lse = run(hidden)
        expected, expected_lse = oracle.attend(hidden)
        assert float((out - expected).norm()) <= 1e-3 * float(expected.norm())
        assert lse is not None
        assert float((lse - expected_lse)[:, :, 0].abs().max()) < 1e-3
        assert torch.all((lse[:, :, 1:] < -1e38) & lse[:, :, 1:].isfinite())
