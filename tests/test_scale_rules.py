"""Searched block scales: judged by error, since two candidates may tie within rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_fp4kv
from torch_fp4kv.ops.format import e4m3
from torch_fp4kv.ops.format.constants import E2M1_VALUES

RULES = ("amax", "4over6", "mse")


def block_errors(x: Tensor, global_scale: float, rule: str) -> Tensor:
    decoded = torch_fp4kv.dequantize(*torch_fp4kv.quantize(x, global_scale, scale_rule=rule), global_scale)
    return (decoded.double() - x.double()).square().unflatten(-1, (-1, 16)).sum(-1)


@pytest.mark.parametrize("global_scale", [0.003, 0.1, 1 / 3])
@pytest.mark.parametrize("distribution", ["normal", "uniform", "heavy"])
def test_more_candidates_never_cost_error(global_scale: float, distribution: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, 128, generator=generator)
    if distribution == "uniform":
        x = torch.rand(1000, 128, generator=generator) - 0.5
    elif distribution == "heavy":
        x = x / torch.rand(1000, 128, generator=generator).clamp(min=0.01)
    amax, two, nine = (block_errors(x, global_scale, rule) for rule in RULES)
    slack = 1 + 1e-5
    assert (two <= amax * slack).all()
    assert (nine <= two * slack).all()


def test_searching_gains_on_normal_data() -> None:
    x = torch.randn(1000, 128, generator=torch.Generator().manual_seed(0))
    amax, two, nine = (block_errors(x, 0.1, rule).sum() for rule in RULES)
    assert two < 0.9 * amax
    assert nine < 0.9 * two


@pytest.mark.parametrize("rule", RULES[1:])
def test_candidate_chosen_is_the_best_one_allowed(rule: str) -> None:
    x = torch.randn(63, 16, generator=torch.Generator().manual_seed(1))
    divisors = {"4over6": (6.0, 4.0), "mse": (6.0, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.5, 7.0)}[rule]
    grid = torch.tensor(E2M1_VALUES, dtype=torch.float64)
    best = torch.full((63,), torch.inf, dtype=torch.float64)
    for divisor in divisors:
        scale = e4m3.decode(e4m3.encode(x.abs().amax(-1) / (0.01 * divisor))) * 0.01
        nearest = (x.abs().double()[..., None] - grid * scale.double()[:, None, None]).abs().amin(-1)
        best = torch.minimum(best, nearest.square().sum(-1))
    assert torch.allclose(block_errors(x, 0.01, rule)[:, 0], best, rtol=1e-4)


@pytest.mark.parametrize("rule", RULES[1:])
def test_no_other_candidate_takes_code_times_scale_above_448(rule: str) -> None:
    x = torch.randn(1000, 16, generator=torch.Generator().manual_seed(2)) * 60
    _, plain = torch_fp4kv.quantize(x, 1 / 3)
    words, scales = torch_fp4kv.quantize(x, 1 / 3, scale_rule=rule)
    largest = (torch_fp4kv.dequantize(words, scales, 1.0)).abs().amax(-1, keepdim=True)
    changed = scales != plain
    assert changed.any()
    assert (largest[changed] <= 448.0).all()
    assert (largest[~changed] > 448.0).any()


@pytest.mark.parametrize("rule", RULES)
def test_zero_nan_and_infinite_blocks_are_as_under_the_plain_rule(rule: str) -> None:
    x = torch.zeros(4, 16)
    x[1, 3], x[2, 0], x[3, :] = torch.nan, torch.inf, 6.0
    plain = torch_fp4kv.quantize(x, 1.0)
    words, scales = torch_fp4kv.quantize(x, 1.0, scale_rule=rule)
    assert torch.equal(words, plain[0])
    assert torch.equal(scales, plain[1])


def test_plain_rule_wins_ties() -> None:
    x = torch.tensor([12.0, 8.0, 4.0, 0.0] * 4)
    for rule in RULES:
        _, scales = torch_fp4kv.quantize(x, 1.0, scale_rule=rule)
        assert scales.item() == 0x40
