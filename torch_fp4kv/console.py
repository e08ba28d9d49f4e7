"""What the commands share: headings, tables, progress bars, files to write."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it: 128 and the number of SIGINT."""


def heading(text: str) -> None:
    """Prints `text`, its first line underlined, with an empty line around it."""
    first, *rest = text.splitlines()
    print("\n".join(["", first, "-" * len(first), *rest]), flush=True)


def table(rows: Sequence[Sequence[str]]) -> None:
    """Prints `rows`, the first being the header, in aligned columns; the first column to the left."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        print("  ".join(cells).rstrip(), flush=True)


def output_file(text: str) -> Path:
    """Type of an option that names a file to write at the end: what cannot be written is refused at the start, and its
    folder is made."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {text}: {error.strerror}") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text}: it is a directory, or write-protected")
    return path


def device(text: str) -> torch.device:
    """Type of an option that names a device: one that is none, or is not here, is refused at the start."""
    try:
        found = torch.device(text)
        torch.empty(0, device=found)
    except (AssertionError, RuntimeError) as error:
        # PyTorch asserts that it was built with CUDA.
        raise argparse.ArgumentTypeError(f"no device {text}: {str(error).splitlines()[0]}") from error
    return found


def pyplot() -> Any:
    """matplotlib's, drawing to files; None, and a line on standard error, where matplotlib is missing."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("no picture: pip install matplotlib", file=sys.stderr)
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


@contextmanager
def progress(total: int, text: str) -> Iterator[Callable[[int], Any]]:
    """A bar on a terminal's standard error that shows after two seconds and goes when done; yields what advances it.

    The clock goes on between two steps, as while a first step compiles.
    """
    from tqdm import tqdm

    style = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}]"
    done = threading.Event()
    with tqdm(total=total, desc=text, leave=False, delay=2, dynamic_ncols=True, disable=None, bar_format=style) as bar:

        def tick() -> None:
            while not done.wait(1):
                if bar.format_dict["elapsed"] > bar.delay:
                    bar.refresh()

        if bar.disable:
            yield bar.update
            return
        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield bar.update
        finally:
            done.set()
            thread.join()
