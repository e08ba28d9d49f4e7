"""`torch-fp4kv COMMAND`: each is a module or package with `add_arguments(parser)` and `run(args) -> exit status`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from .console import INTERRUPTED

COMMANDS = {
    "demo": ("demo", "generate with a real model and an NVFP4 cache, and score what the cache costs"),
    "doctor": ("doctor", "what works on this machine, and for what does not, the reason"),
    "eval": ("evaluation.command", "score recipes on running text and on a copy task"),
    "bench": ("bench", "measure caches on this machine"),
}
"""Module and help line by command; a module is imported only when its command is called."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; `argv` without the program's name, default `sys.argv[1:]`. `INTERRUPTED` after Ctrl-C, 1 where
    what reads the output is gone."""
    try:
        return _run(argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Else the interpreter flushes into the closed pipe once more, and says that it failed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(argv: Sequence[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="torch-fp4kv", description="FP4 KV cache for PyTorch models.")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    module = None
    for name, (module_name, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if argv[:1] == [name]:
            module = importlib.import_module(f"{__package__}.{module_name}")
            module.add_arguments(command)
    args = parser.parse_args(argv)
    assert module is not None
    status: int = module.run(args)
    return status


def _version() -> str:
    from . import __version__

    return f"torch-fp4kv {__version__}"
