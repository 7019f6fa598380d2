"""Every fenced command of the pages has a class, and the quick ones run as they are written."""

from collections import Counter
from pathlib import Path

import pytest

from tests.unit.docs.fenced import FencedCommand, find_commands, load_class, load_elsewhere, normalize, prepare, run


def test_every_command_has_one_class_and_every_row_a_command() -> None:
    rows = [command.text for name in ("quick", "slow") for command in load_class(name)]
    rows += [command for listed in load_elsewhere().values() for command in listed]
    classes = Counter(map(normalize, rows))
    found = find_commands()
    assert {command: pages for command, pages in found.items() if command not in classes} == {}, "no class"
    assert [command for command in classes if command not in found] == [], "on no page"
    assert [command for command, count in classes.items() if count > 1] == []


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reader")
    prepare(path)
    return path


@pytest.mark.parametrize("command", load_class("quick"), ids=lambda command: command.text)
def test_a_quick_command_runs_as_the_page_writes_it(command: FencedCommand, directory: Path) -> None:
    done = run(command, directory, timeout_s=280)
    assert done.returncode == command.exit_code, done.stdout + done.stderr
