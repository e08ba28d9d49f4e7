"""For a test suite: the ops under `torch.library.opcheck`, a cache held to a KL, greedy text held to a record."""

from .close import assert_cache_close
from .golden import assert_golden, record_golden
from .op_cases import OP_CASES, OpCase

__all__ = ["OP_CASES", "OpCase", "assert_cache_close", "assert_golden", "record_golden"]
