"""The harness of every command: it parses the arguments, runs, and maps what happened to one table of exit codes.

`nemo-rl <verb>` and the scripts in examples/ each hold a `Command` and hand it to `run_command`.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

from nemo_rl.errors import ConfigError, DataError, NemoRLError

ValueT = TypeVar("ValueT")


class ExitCode(IntEnum):
    """Exit codes of all commands, each with its meaning."""

    meaning: str

    DONE = 0, "the command did all that was asked"
    FAILED = 1, "an error while running, or rollouts that failed or are missing"
    BAD_INPUT = 2, "arguments, a configuration or data that cannot be used"
    INTERRUPTED = 130, "stopped by Ctrl-C, SIGTERM or SIGHUP; finished work is stored"

    def __new__(cls, code: int, meaning: str) -> "ExitCode":
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member


@dataclass(frozen=True, slots=True)
class Command:
    """A command as its user types it.

    `reported_errors` are exceptions whose text is enough for the user, beside `NemoRLError`; any other exception keeps
    its traceback, and Python exits with 1.
    """

    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], ExitCode]
    program: str | None = None  # as --help shows it; None: the script's name
    reported_errors: tuple[type[Exception], ...] = ()
    details: Callable[[], str] | None = None  # made for --help alone, and shown at its end
    takes_command: bool = False  # the words after `--` are another command: `parsed.command`


def run_command(command: Command, arguments: Sequence[str] | None = None) -> ExitCode:
    """Run a command with `arguments` (None: those of the process) and return its exit code."""
    parser = _Parser(
        prog=command.program, description=command.description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.details = command.details
    command.add_arguments(parser)
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if command.takes_command and "--" in words else len(words)
    parsed = parser.parse_intermixed_args(words[:end])
    if command.takes_command:
        parsed.command = words[end + 1 :]
    try:
        return command.run(parsed)
    except NemoRLError as error:
        notes = [str(note) for note in getattr(error, "__notes__", ())]
        sys.stderr.write("\n".join([f"{type(error).__name__}: {error}", *notes]) + "\n")
        return exit_code_of(type(error))
    except command.reported_errors as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.FAILED
    except BaseException as error:
        if not isinstance(error, (KeyboardInterrupt, *_cancellations())):
            raise
        sys.stderr.write("interrupted\n")
        return ExitCode.INTERRUPTED


def text_argument(parse: Callable[[str], ValueT]) -> Callable[[str], ValueT]:
    """Return `parse` as a type of argparse that shows the user the text of its ValueError."""

    def argument(text: str) -> ValueT:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return argument


def path_argument(text: str) -> Path:
    """Return the path that a word of the command line names, as a type of argparse that refuses an empty one."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is no path; allowed: a file or directory, . for this one")
    return Path(text)


def exit_code_of(error: type[NemoRLError]) -> ExitCode:
    """Return the exit code of a command that an error of this type ended."""
    return ExitCode.BAD_INPUT if issubclass(error, ConfigError | DataError) else ExitCode.FAILED


class _Parser(argparse.ArgumentParser):
    """A parser whose help ends with details that are made on request."""

    details: Callable[[], str] | None = None

    def format_help(self) -> str:
        return super().format_help() + ("" if self.details is None else "\n" + self.details())


def _cancellations() -> tuple[type[BaseException], ...]:
    """Return asyncio.CancelledError, unless nothing has imported asyncio, whose import takes long."""
    return (sys.modules["asyncio"].CancelledError,) if "asyncio" in sys.modules else ()
