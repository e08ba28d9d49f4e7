"""Draws `results/attention.csv`: decode attention's speed in a graph, over the best BF16 and the best FP8 peer.

python benchmarks/plot.py [results.csv picture.png]      (needs matplotlib)
"""

from __future__ import annotations

import csv
import re
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

RESULTS = Path(__file__).parent / "results"
CASE = re.compile(r"B (\d+) × (\d+)")
"""Cases of the default shape; those with a head size, a group or an exact window of their own have more in the name."""


def main() -> None:
    source, target = (
        map(Path, sys.argv[1:3]) if sys.argv[1:] else (RESULTS / "attention.csv", RESULTS / "attention.png")
    )
    with source.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["over_bf16"] and CASE.fullmatch(row["case"])]
    lines: dict[int, list[tuple[int, float, float]]] = defaultdict(list)
    for row in rows:
        batch, tokens = map(int, CASE.fullmatch(row["case"]).groups())
        lines[batch].append((tokens, float(row["in_graph_over_bf16"]), float(row["in_graph_over_fp8"])))
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.4), sharex=True, sharey=True)
    for column, (panel, peer) in enumerate(zip(panels, ("BF16", "FP8")), start=1):
        for batch, points in sorted(lines.items()):
            points.sort()
            panel.plot(
                [p[0] for p in points], [p[column] for p in points], marker="o", markersize=4, label=f"batch {batch}"
            )
        panel.axhline(1, color="black", linewidth=0.8, linestyle=":")
        panel.set(title=f"over the fastest {peer} kernel", xlabel="tokens of context", xscale="log", ylim=(0, None))
        ticks = sorted({p[0] for points in lines.values() for p in points})
        panel.set_xticks(ticks, [f"{t // 1024}k" for t in ticks])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("times as fast")
    panels[1].legend(frameon=False, loc="upper left", ncols=2)
    first = rows[0]
    figure.suptitle(
        f"NVFP4 decode attention, {first['gpu']}, torch {first['torch']}, triton {first['triton']}", fontsize=10
    )
    figure.tight_layout()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
