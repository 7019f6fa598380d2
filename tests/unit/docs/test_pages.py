"""Links, file names and identifiers that the pages name exist."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.docs.pages import (
    CODE,
    DOCS,
    PAGES,
    ROOT,
    anchors,
    code_spans,
    commands,
    fenced_blocks,
    links,
    tables,
    text_of,
)

PACKAGE = ROOT / "nemo_rl"
TOPS = (PACKAGE, *(ROOT / name for name in ("tests", "examples", "scripts", "benchmarks")))
FILE = re.compile(
    r"[\w./-]+\.(?:py|sh|sbatch|jinja)\b(?!\.?\w)"
)  # of the repository; rows, logs and recipes are the reader's
OF_THE_READER = {
    "rewards.py",
    "agents.py",
    "environments.py",
    "my_envs.py",
    "my_data.py",
    "harness.py",
    "collect.sbatch",
    "aggregate.sbatch",
    "train.sbatch",
}  # files that a page lets the reader write


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_page_and_a_heading(page: Path) -> None:
    broken = []
    for target in links(page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (anchor and anchor not in anchors(path.read_text(encoding="utf-8"))):
            broken.append(target)
    assert broken == []


def test_every_page_is_linked_from_the_index_or_from_the_decisions_and_is_in_the_navigation() -> None:
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} - {"index.md"}
    listed = [target for page in ("index.md", "decisions.md") for target in links(text_of(page))]
    assert pages - {target.partition("#")[0] for target in listed} == set()
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(_leaves(navigation)) == sorted(pages | {"index.md"})


def _leaves(node: Any) -> Iterator[str]:
    """Yield the pages of a navigation: nested lists of {title: page or list}."""
    if isinstance(node, str):
        yield node
    else:
        for child in node.values() if isinstance(node, dict) else node:
            yield from _leaves(child)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    missing = []
    for code in code_spans(page.read_text(encoding="utf-8")):
        for name in FILE.findall(code):
            if name not in OF_THE_READER and not _exists(name, code):
                missing.append(name)
    assert missing == []


def _exists(name: str, code: str) -> bool:
    if (ROOT / name).exists() or (PACKAGE / name).exists():
        return True
    if any(character in code for character in "<*~$") or name.startswith(("/", "-")):
        return True  # a pattern, or a path outside of the repository
    return any(path.name == Path(name).name for path in _files() if str(path).endswith("/" + name))


def _files() -> list[Path]:
    return [path for top in TOPS for path in top.rglob("*") if path.is_file()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_quoted_log_line_names_a_module(page: Path) -> None:
    names = set(re.findall(r"\b(?:INFO|WARNING|ERROR) ([a-z_.]+): ", page.read_text(encoding="utf-8")))
    modules = {path.stem for path in PACKAGE.rglob("*.py")}
    assert sorted(names - modules) == []


def test_every_page_that_a_source_names_exists() -> None:
    named = {name for path in _files() if path.suffix in (".py", ".yaml", "") for name in _pages_named_in(path)}
    assert {name for name in named if not (ROOT / name).exists()} == set()


def _pages_named_in(path: Path) -> list[str]:
    return re.findall(r"\bdocs/[\w/]+\.md\b", path.read_text(encoding="utf-8", errors="ignore"))


def test_the_glossary_names_types_where_they_are() -> None:
    missing = []
    for table in tables(DOCS / "glossary.md"):
        if "where" not in table.head:
            continue
        for row in table.rows:
            file, *names = CODE.findall(row[table.head.index("where")])
            path = PACKAGE / file
            if not path.exists():
                missing.append(file)
                continue
            missing += [f"{file}: {name}" for name in names if name not in _top_level_names(path)]
    assert missing == []


def _top_level_names(path: Path) -> set[str]:
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_runs_a_script_that_exists(page: Path) -> None:
    missing = []
    for command in commands(page.read_text(encoding="utf-8")):
        words = shlex.split(command.replace("'", "").replace('"', ""))
        scripts = [word for word in words if re.fullmatch(r"(?:examples|benchmarks|scripts)/[\w/-]+(?:\.py)?", word)]
        missing += [script for script in scripts if not (ROOT / script).exists()]
    assert missing == []


def test_every_fenced_block_is_closed() -> None:
    odd = [page.name for page in PAGES if page.read_text(encoding="utf-8").count("\n```") % 2]
    assert odd == []
    assert any(list(fenced_blocks(page.read_text(encoding="utf-8"))) for page in PAGES)
