"""Every Python snippet of the documentation runs, page by page, in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

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


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    if not page.exists():
        pytest.skip("the documentation is in the checkout, not in the package")
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
