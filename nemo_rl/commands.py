"""The harness of every command: it parses the arguments, runs, and maps what happened to one table of exit codes.

`nemo-rl <verb>` and the scripts in examples/ each hold a `Command` and hand it to `run_command`.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from nemo_rl.errors import ConfigError, DataError, NemoRLError


class ExitCode(IntEnum):
    """Exit codes of all commands, each with its meaning."""

    meaning: str

    DONE = 0, "the command did all that was asked"
    FAILED = 1, "an error while running, or rollouts that failed or are missing"
    BAD_INPUT = 2, "arguments, a configuration or data that cannot be used"
    INTERRUPTED = 130, "stopped by Ctrl-C or SIGTERM; finished work is stored"

    def __new__(cls, code: int, meaning: str) -> "ExitCode":
        """Return the member of this code."""
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


def run_command(command: Command, arguments: Sequence[str] | None = None) -> ExitCode:
    """Run a command with `arguments` (None: those of the process) and return its exit code."""
    parser = argparse.ArgumentParser(
        prog=command.program, description=command.description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_arguments(parser)
    parsed = parser.parse_intermixed_args(arguments)
    try:
        return command.run(parsed)
    except NemoRLError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return ExitCode.BAD_INPUT if isinstance(error, ConfigError | DataError) else ExitCode.FAILED
    except command.reported_errors as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.stderr.write("interrupted\n")
        return ExitCode.INTERRUPTED
