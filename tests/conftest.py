"""Which tests run here: those marked `gpu` need a CUDA GPU, those marked `slow` need `--run-slow`."""

from __future__ import annotations

import pytest
import torch
import torch._inductor.config


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run the tests that take minutes")


def pytest_configure() -> None:
    # The tensors here are small: a second thread costs more than it gives, much more on a busy machine.
    torch.set_num_threads(1)
    # A graph that comes from Inductor's cache is not lowered again: an earlier run would hide what a test looks at.
    torch._inductor.config.force_disable_caches = True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skips = {}
    if not torch.cuda.is_available():
        skips["gpu"] = pytest.mark.skip(reason="no CUDA GPU")
    if not config.getoption("--run-slow"):
        skips["slow"] = pytest.mark.skip(reason="takes minutes; --run-slow runs it")
    for item in items:
        for marker, skip in skips.items():
            if item.get_closest_marker(marker):
                item.add_marker(skip)
