"""The pages of the documentation as data: tables, links, fenced blocks, quoted errors."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md"]
GENERATED = {"keys.md", "errors.md"}  # scripts/reference
WRITTEN = [page for page in PAGES if page.name not in GENERATED]
PROGRAM = re.compile(r"(uv|nemo-rl|jq|python|pip|sbatch|srun|ray|kill|tensorboard) |scripts/\w")
CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a page: the cells of its head and of its rows."""

    page: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def text_of(page: str) -> str:
    (path,) = (path for path in PAGES if path.name == page)
    return path.read_text(encoding="utf-8")


def tables(page: Path) -> Iterator[Table]:
    """Yield the tables outside of fenced blocks."""
    lines: list[str] = []
    for line in [*_outside_fences(page.read_text(encoding="utf-8")), ""]:
        if line.startswith("|"):
            lines.append(line)
        elif lines:
            head, _, *rows = map(_cells, lines)
            yield Table(page.name, head, tuple(rows))
            lines = []


def fenced_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield (language, content) of each fenced block."""
    for match in re.finditer(r"^```([\w-]*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield match[1], match[2]


def commands(text: str) -> Iterator[str]:
    """Yield the shell commands of the fenced blocks, continued lines joined, comments removed.

    They are the lines of `sh` blocks, the lines after `$ `, and those of blocks without a language that begin
    like PROGRAM.
    """
    for language, content in fenced_blocks(text):
        for line in re.sub(r"\\\n\s*", "", content).splitlines():
            is_command = language == "sh" or line.startswith("$ ") or (not language and PROGRAM.match(line))
            if is_command and (command := re.sub(r"(^|\s)#.*", "", line.removeprefix("$ ")).strip()):
                yield command


def quoted_errors(text: str) -> Iterator[str]:
    """Yield the errors of this project that fenced blocks quote, each on one line."""
    for _, content in fenced_blocks(text):
        entry: list[str] = []
        for line in [*content.splitlines(), ""]:
            if entry and line.startswith("  "):
                entry.append(line.strip())
                continue
            if entry:
                yield " ".join(entry)
            entry = [line] if re.match(r"[A-Z]\w+(Error|Died): ", line) else []


def normalized(text: str) -> str:
    return " ".join(text.split())


def code_spans(text: str) -> list[str]:
    """Return what stands in backticks outside of fenced blocks."""
    return [code for line in _outside_fences(text) for code in CODE.findall(line)]


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub writes them."""
    headings = [line.lstrip("#").strip() for line in _outside_fences(text) if re.match(r"#+ ", line)]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(text: str) -> Iterator[str]:
    """Yield the targets of links outside of fenced blocks."""
    for line in _outside_fences(text):
        yield from re.findall(r"\]\(([^)\s]+)\)", line)


def _outside_fences(text: str) -> Sequence[str]:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).splitlines()


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1])
