import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_lists_every_module_as_it_describes_itself() -> None:
    tree = runpy.run_path(str(ROOT / "scripts" / "tree"))["tree"]
    page = (ROOT / "docs" / "tree.md").read_text(encoding="utf-8")
    assert page == tree(ROOT), "run scripts/tree"


def test_every_module_describes_itself() -> None:
    page = (ROOT / "docs" / "tree.md").read_text(encoding="utf-8")
    assert [line for line in page.splitlines() if line.endswith("|  |")] == []
