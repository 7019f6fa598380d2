"""The site of docs/ builds without a warning, its search knows the pages, and no page requests anything elsewhere."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.docs.pages import DOCS, ROOT

pytest.importorskip("mkdocs", reason="the group docs is not installed: uv sync --group docs")
LOADED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    return directory


def test_every_page_is_in_the_site_and_can_be_searched(site: Path) -> None:
    pages = {str(path.relative_to(DOCS).with_suffix(".html")) for path in DOCS.rglob("*.md")}
    assert {page for page in pages if not (site / page).is_file()} == set()
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert pages - {entry["location"].partition("#")[0] for entry in index["docs"]} == set()


def test_no_page_requests_anything_from_another_host(site: Path) -> None:
    loaded = {tag for page in site.rglob("*.html") for tag in LOADED.findall(page.read_text(encoding="utf-8"))}
    styles = {url for page in site.rglob("*.css") for url in re.findall(r"url\(\s*['\"]?https?:", page.read_text())}
    assert loaded | styles == set()
