"""What the commands over collections share: seeds as an argument, errors as one message."""

import argparse
import sys
from collections.abc import Callable, Sequence

from nemo_rl.config.collect import parse_seeds
from nemo_rl.errors import ConfigError, DataError, NemoRLError
from nemo_rl.observability.logging_setup import configure_logging

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2  # as argparse
EXIT_INTERRUPTED = 130  # as a shell after Ctrl-C


def run_command(
    parser: argparse.ArgumentParser, arguments: Sequence[str], work: Callable[[argparse.Namespace], None]
) -> int:
    """Parse and work; the exit code. Errors of ours and of the file system are one message."""
    parsed = parser.parse_intermixed_args(arguments)
    configure_logging()
    try:
        work(parsed)
    except NemoRLError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return EXIT_BAD_INPUT if isinstance(error, ConfigError | DataError) else EXIT_FAILED
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_FAILED
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    return 0


def parse_seeds_argument(text: str) -> tuple[int, ...]:
    """Seeds as on the command line of `collect`: "0,2,5..7" is 0, 2, 5, 6, 7."""
    try:
        return parse_seeds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
