"""The picture of `torch-fp4kv bench generate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .. import console
from .generate import Row


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Time a token against context and against batch; a line on standard error where matplotlib is missing."""
    pyplot = console.pyplot()
    if pyplot is None:
        return
    measured = [row for row in rows if not row.failed]
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for panel, along, other in ((panels[0], "prompt", "batch"), (panels[1], "batch", "prompt")):
        for name, fixed in dict.fromkeys((row.cache, getattr(row, other)) for row in measured):
            line = [row for row in measured if (row.cache, getattr(row, other)) == (name, fixed)]
            line.sort(key=lambda row: getattr(row, along))
            places = [getattr(row, along) for row in line]
            panel.plot(places, [row.token_p50_ms for row in line], marker="o", label=f"{name}, {other} {fixed}")
        panel.set(
            xlabel=f"{along} (tokens)" if along == "prompt" else "batch (rows at once)", xscale="log", yscale="log"
        )
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    panels[0].set_ylabel("median time a token, ms")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
