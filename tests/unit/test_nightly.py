"""The nightly command: a log and a line for each check, and exit code 1 where one failed."""

import runpy
from pathlib import Path

import pytest

NIGHTLY = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "nightly"))
run_checks = NIGHTLY["run_checks"]
WORKS = ("-c", "print('the figures'); print('4 of 4')")


def test_each_check_has_a_log_and_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_checks({"one": WORKS, "two": WORKS}, tmp_path / "logs") == 0
    assert (tmp_path / "logs" / "two.log").read_text() == "the figures\n4 of 4\n"
    one, two, summary = capsys.readouterr().out.splitlines()
    assert one.split()[:2] == ["ok", "one"]
    assert two.endswith("s  4 of 4")
    assert summary == f"2 of 2 passed; logs: {tmp_path / 'logs'}"


def test_a_check_that_fails_does_not_keep_the_others_from_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_checks({"one": ("-c", "raise SystemExit('it broke')"), "two": WORKS}, tmp_path) == 1
    one, two, summary = capsys.readouterr().out.splitlines()
    assert one.split()[:2] == ["FAILED", "one"]
    assert one.endswith("exit code 1: it broke")
    assert two.split()[0] == "ok"
    assert summary.startswith("1 of 2 passed")


def test_a_check_that_does_not_end_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_checks({"one": ("-c", "import time; time.sleep(600)")}, tmp_path, deadline_s=0.5) == 1
    assert "no end in 0 s: no output" in capsys.readouterr().out


def test_no_check_at_all_is_a_failure(tmp_path: Path) -> None:
    assert run_checks({}, tmp_path) == 1


def test_every_check_names_files_of_the_repository() -> None:
    root = Path(__file__).parents[2]
    for command in (NIGHTLY["CHECKS"] | NIGHTLY["PEERS"]).values():
        files = [part for part in command if part.endswith(".py") or part == "tests"]
        assert files
        assert all((root / file).exists() for file in files)
