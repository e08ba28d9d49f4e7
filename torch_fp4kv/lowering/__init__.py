"""Inductor lowerings of the ops, one file each; importing this package imports no part of Inductor.

A lowering enters Inductor when one of our ops is traced in a process that has Inductor loaded (`registry.py`). What
was lowered and what was left to the op itself, with the reason, is in `report()`.
"""

from .registry import opt_in, opt_out, register, report

__all__ = ["opt_in", "opt_out", "register", "report"]
