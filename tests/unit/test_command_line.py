import argparse
import asyncio

import pytest

from nemo_rl.command_line import Command, ExitCode, run_command
from nemo_rl.errors import CheckpointError, ConfigError, DataError, GenerationError, JobError, RolloutError


def add_code(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("code", type=int)


def return_code(parsed: argparse.Namespace) -> ExitCode:
    return ExitCode(parsed.code)


def fail_with(error: BaseException, *reported_errors: type[Exception]) -> Command:
    def run(parsed: argparse.Namespace) -> ExitCode:
        raise error

    return Command("Fail.", lambda parser: None, run, reported_errors=reported_errors)


@pytest.mark.parametrize("code", list(ExitCode))
def test_a_command_returns_its_exit_code(code: ExitCode) -> None:
    assert run_command(Command("Return a code.", add_code, return_code), [str(int(code))]) is code


def test_bad_arguments_have_the_exit_code_of_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        run_command(Command("Return a code.", add_code, return_code, program="prog"), ["x"])
    assert refused.value.code == ExitCode.BAD_INPUT
    assert capsys.readouterr().err.startswith("usage: prog ")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a.b", 1, "no"), ExitCode.BAD_INPUT),
        (DataError("file:1: no"), ExitCode.BAD_INPUT),
        (CheckpointError("no"), ExitCode.FAILED),
        (GenerationError("no"), ExitCode.FAILED),
        (JobError("no"), ExitCode.FAILED),
        (RolloutError("no"), ExitCode.FAILED),
    ],
)
def test_an_error_of_ours_is_one_line(error: Exception, code: ExitCode, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(fail_with(error), []) is code
    assert capsys.readouterr().err == f"{type(error).__name__}: {error}\n"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError()])
def test_an_interruption_has_no_traceback(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(fail_with(error), []) is ExitCode.INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


def test_only_reported_errors_lose_their_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(fail_with(FileNotFoundError("gone"), OSError), []) is ExitCode.FAILED
    assert capsys.readouterr().err == "gone\n"
    with pytest.raises(FileNotFoundError):
        run_command(fail_with(FileNotFoundError("gone")), [])
