"""`torch-fp4kv bench WHAT`: one module a WHAT, with `add_arguments(parser)` and `run(args) -> exit status`."""

from __future__ import annotations

import argparse
import importlib

BENCHES = {
    "generate": "caches side by side in one generate",
    "attention": "one token's attention beside SDPA over BF16",
    "compile": "a compiled decode's start, cold and warm",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    for name, text in BENCHES.items():
        importlib.import_module(f".{name}", __package__).add_arguments(benches.add_parser(name, help=text))


def run(args: argparse.Namespace) -> int:
    status: int = importlib.import_module(f".{args.bench}", __package__).run(args)
    return status
