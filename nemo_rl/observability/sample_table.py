"""Rollouts as a table for the terminal: whatever a model wrote is shown as text, never obeyed."""

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

MAX_CELL_CHARS = 400
FILE_WIDTH = 120  # columns where the output is no terminal


def sample_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> Table:
    """Long text is cut in its middle; markup is not read, control characters are spelled out."""
    table = Table(title=Text(title), show_lines=True)
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    for row in rows:
        table.add_row(*(Text(shown(str(cell))) for cell in row))
    return table


def shown(text: str, max_chars: int = MAX_CELL_CHARS) -> str:
    """Text that a terminal may be sent.

    Example: with `max_chars` 5, "abcdefgh" is "ab…gh"; an escape character is spelled "\\x1b".
    """
    text = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    if len(text) <= max_chars:
        return text
    head = max_chars // 2
    return f"{text[:head]}…{text[len(text) - (max_chars - head - 1) :]}"


def render_table(table: Table, width: int = FILE_WIDTH) -> str:
    """The table without colour, for a log file; begins on a line of its own."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return "\n" + capture.get().rstrip()
