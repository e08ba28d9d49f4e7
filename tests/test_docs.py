"""Every Python snippet of the documentation runs, page by page, in order."""

from __future__ import annotations

import ast
import csv
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch_fp4kv

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def snippets(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(not PAGES, reason="the documentation is in the checkout, not in the package")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_snippets_run(page):
    namespace: dict[str, object] = {"__name__": page.stem}
    for number, snippet in enumerate(snippets(page)):
        exec(compile(snippet, f"{page.name}, snippet {number}", "exec"), namespace)


def slugs(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    if not page.exists():
        pytest.skip("the documentation is in the checkout, not in the package")
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:")):
            continue
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in slugs(file), f"{page.name} links to {target}#{anchor}"


@pytest.mark.skipif(not PAGES, reason="the documentation is in the checkout, not in the package")
def test_the_site_has_every_page():
    named = re.findall(r"^  - .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == [page.name for page in PAGES]


def messages() -> str:
    """All strings of the package's code, with … for what is put into them."""
    found = []
    for file in Path(torch_fp4kv.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


@pytest.mark.skipif(not PAGES, reason="the documentation is in the checkout, not in the package")
def test_messages_of_the_troubleshooting_page_are_the_codes():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(quoted) > 15
    code = messages()
    for message in quoted:
        # A number or name in the message may be a constant put into it.
        pattern = re.escape(message).replace("16", "(16|…)")
        assert re.search(pattern, code), f"no such message: {message}"


def rows_of(name: str) -> list[dict[str, str]]:
    with (ROOT / "benchmarks" / "results" / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def table_rows(page: str, first: str, num_cells: int) -> list[list[str]]:
    """Cells of the page's table rows of `num_cells` whose first cell looks like `first`, without units."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip(" ×%ms") for cell in line.strip("| ").split(" | ")] for line in lines if line.startswith("|")]
    return [row for row in rows if len(row) == num_cells and re.match(first, row[0])]


def rounded_to(figure: str, value: str) -> bool:
    """Whether `figure` is `value` (which was rounded itself) to as many decimals as it has."""
    return abs(float(figure) - float(value)) <= 0.5 * 10 ** -len(figure.partition(".")[2]) + 1e-9


@pytest.mark.skipif(not PAGES, reason="the documentation is in the checkout, not in the package")
def test_speeds_of_the_readme_are_those_measured():
    measured = {row["case"]: row for row in rows_of("attention.csv") if row["implementation"] == "NVFP4"}
    rows = table_rows("README.md", r"\d+ × \d+k$", 4)
    assert len(rows) == 4
    for case, *figures in rows:
        batch, context = case.removesuffix("k").split(" × ")
        row = measured[f"B {batch} × {1024 * int(context)}"]
        for figure, column in zip(figures, ("in_graph_ms", "in_graph_over_bf16", "in_graph_over_fp8"), strict=True):
            assert rounded_to(figure, row[column]), (case, column)


@pytest.mark.skipif(not PAGES, reason="the documentation is in the checkout, not in the package")
def test_whole_models_of_the_readme_are_those_measured():
    units = {"ms": 1.0, "s": 1e3, "GB": 1e9, "rows": 1.0}
    measured: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows_of("generate.csv"):
        measured.setdefault((row["batch"], row["prompt"], row["cache"]), []).append(row)
    rows = table_rows("README.md", r"\d+ rows? × \d+k$", 5)
    assert len(rows) == 3
    columns = ("token_p50_ms", "first_token_ms", "cache_bytes", "largest_batch")
    for case, *cells in rows:
        batch, context = re.fullmatch(r"(\d+) rows? × (\d+)k", case).groups()
        # The newest.
        ours, theirs = (measured[batch, str(1024 * int(context)), name][-1] for name in ("nvfp4", "static"))
        assert ours["run"] == theirs["run"]
        for cell, column in zip(cells, columns, strict=True):
            if cell == "–":
                assert not ours[column]
                continue
            figure, unit, other = re.match(r"([\d.]+) (\w+) in place of ([\d.]+)", f"{cell} ").groups()
            for shown, row in ((figure, ours), (other, theirs)):
                assert rounded_to(shown, str(float(row[column]) / units[unit])), (case, column)


@pytest.mark.skipif(not PAGES, reason="the documentation is in the checkout, not in the package")
def test_a_first_call_of_the_readme_is_as_measured():
    seconds = {row["cache"]: row["warm_up_s"] for row in rows_of("generate.csv") if row["prompt"] == "2048"}
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    figures = re.search(
        r"the first call took (\d+) s on an H200, (\d+) with `StaticCache`\n\(batch 1 × 2k;", text
    ).groups()
    assert rounded_to(figures[0], seconds["nvfp4"]) and rounded_to(figures[1], seconds["static"])


@pytest.mark.skipif(not PAGES, reason="the documentation is in the checkout, not in the package")
def test_speeds_beside_flashinfer_are_those_measured():
    cases = {
        "decode, 64 rows of 8k": "decode B 64 × 8192",
        "decode, 16 rows of 16k": "decode B 16 × 16384",
        "decode, 1 row of 128k": "decode B 1 × 131072",
        "decode, 1 row of 8k": "decode B 1 × 8192",
        "prefill, 2k tokens over 32k": "prefill 2048 over 32768",
    }
    measured = {(row["case"], row["implementation"]): row for row in rows_of("flashinfer.csv")}
    table = table_rows("docs/backends.md", "(decode|prefill), ", 5)
    rows = {row[0].removesuffix(" token"): row[1:] for row in table}
    assert set(rows) == set(cases)
    ratios = []
    for name, (ours, *theirs) in rows.items():
        kernel = "triton-gluon" if name.startswith("decode") else "triton-prefill"
        shown = [(kernel, ours, None)]
        for kernel, cell in zip(("NVFP4", "BF16", "FP8"), theirs, strict=True):
            shown.append((f"FlashInfer FA2 {kernel}", *re.match(r"(.*) \(([\d.]+)\)", cell).groups()))
        for kernel, time, ratio in shown:
            row = measured[cases[name], kernel]
            figure, microseconds = re.match(r"([\d.]+)( µ)?", time).groups()
            assert rounded_to(figure, str(float(row["p50_ms"]) * (1e3 if microseconds else 1))), (name, kernel)
            assert ratio is None or rounded_to(ratio, row["speed_of_ours"]), (name, kernel)
        if name.startswith("decode") and name != "decode, 1 row of 8k":
            ratios.append(shown[1][2])
    assert f"{min(ratios)} to {max(ratios)} times as fast as its NVFP4" in (ROOT / "README.md").read_text(
        encoding="utf-8"
    )


@pytest.mark.skipif(not PAGES, reason="the documentation is in the checkout, not in the package")
@pytest.mark.parametrize(
    ("page", "num_cells", "columns"),
    [("README.md", 5, (2, 3, 1)), ("docs/recipes.md", 8, (1, 4, 7))],
    ids=["readme", "recipes"],
)
def test_qualities_of_recipes_are_those_measured(page, num_cells, columns):
    measured = {(row["task"], row["recipe"]): row for row in rows_of("quality_smollm2.csv")}
    rows = table_rows(page, "`[a-z0-9-]+`", num_cells)
    assert len(rows) >= 5
    for row in rows:
        name = " with ".join(row[0].split("`")[1::2])
        found = {task: measured[task, name] for task in ("text", "copy")}
        wanted = found["text"]["kl"], found["copy"]["kl"], found["text"]["share_of_bf16_8k"]
        for column, value in zip(columns, wanted, strict=True):
            assert rounded_to(row[column], value), (name, row[column], value)
