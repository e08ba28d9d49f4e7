"""What the documentation's table says of `NVFP4Cache`, as the program that the table names finds it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
operations = pytest.importorskip("cache_operations", reason="the examples are in the checkout, not in the package")


@pytest.mark.parametrize("row", operations.ROWS)
def test_row(row):
    assert operations.tried(row, operations.make_ours) == "yes"


def test_a_cache_that_cannot_is_told_from_one_that_can():
    class Uncropped(operations.NVFP4Cache):
        def crop(self, tokens_to_remove):
            """Does nothing."""

    assert operations.tried("crop", operations.NVFP4Cache) == "yes"
    assert operations.tried("crop", Uncropped).startswith("decodes something else")
