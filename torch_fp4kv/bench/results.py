"""Rows of a bench: as cells of a table, and as a CSV that names hardware and versions."""

from __future__ import annotations

import csv
import platform
from pathlib import Path
from typing import Any

import torch


def environment() -> dict[str, str]:
    """Hardware and versions, for the columns of a results file."""
    import transformers

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {"device": gpu, "torch": torch.__version__, "transformers": transformers.__version__}


def write_csv(path: Path, rows: list[dict[str, Any]], constants: dict[str, str]) -> None:
    """Writes `rows`, each with `constants`, to `path`."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*rows[0], *constants])
        writer.writeheader()
        writer.writerows({**row, **constants} for row in rows)


def cell(value: Any) -> str:
    """Four digits of a float; "-" for what is not known, NaN or None."""
    if value is None or value != value:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
