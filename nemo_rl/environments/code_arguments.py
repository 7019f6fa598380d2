"""Arguments that a program of a command line executes as code: `bash -c CODE`, `python -c CODE`, `env -S CODE`.

A check of the operator's templates against the mistake of a prompt in code, not a sandbox: it knows common programs.
"""

import contextlib
import itertools
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

NOTHING = re.compile(r"(?!)")
SHELL_CURE = """as in [sh, -c, 'program "$1"', sh, '{prompt}']"""
PYTHON_CURE = "as in [python, -c, 'import sys; print(sys.argv[1])', '{prompt}']"
OPERAND_CURE = "after the code"
ENV_CURE = "as in [env, A=1, program, '{prompt}']"


@dataclass(frozen=True, slots=True)
class Executor:
    """A kind of program, and how it is given code."""

    name: re.Pattern[str]  # the last part of its path
    code: re.Pattern[str]  # beginning of the option whose argument is code
    cure: str
    with_value: re.Pattern[str] = NOTHING  # options with an argument of another kind
    is_after_operands: bool = False  # its options may come after operands, and a program that it starts


ENV = Executor(
    re.compile("env"), re.compile(r"-[0iv]*S|--split-string"), ENV_CURE, re.compile(r"-[0iv]*[uC]|--unset|--chdir")
)
EXECUTORS = (
    ENV,
    Executor(
        re.compile("sh|bash|dash|ash|zsh|ksh|mksh|fish|csh|tcsh|su|runuser|script|flock"),
        re.compile(r"-[A-Za-z]*c|--command\b"),  # -c, -lc, -ce
        SHELL_CURE,
        re.compile(r"[-+][A-Za-z]*[oO]"),  # -o pipefail
        is_after_operands=True,
    ),
    Executor(re.compile("ssh"), re.compile(""), SHELL_CURE, is_after_operands=True),  # the other end's shell reads all
    Executor(
        re.compile(r"(?:python|pypy)[0-9.]*"),
        re.compile(r"-[bBdEiIOPqsSuvx]*c"),
        PYTHON_CURE,
        re.compile(r"-[bBdEiIOPqsSuvx]*[WX]"),
    ),
    Executor(re.compile("node|nodejs|bun|deno"), re.compile(r"-p?e\b|-p\b|--eval\b|--print\b"), OPERAND_CURE),
    Executor(re.compile(r"(?:perl|ruby|lua)[0-9.]*"), re.compile(r"-[A-Za-z0-9]*[eE]"), OPERAND_CURE),
    Executor(re.compile(r"php[0-9.]*"), re.compile(r"-[rBRE]\b|--run\b"), OPERAND_CURE),
)


def find_code(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each argument that is code, whatever starts the program that executes it, and how data is passed to it.

    An option may hold its code itself. Example: ["timeout", "9", "bash", "-lc", "ls"] has "-lc" and "ls".
    """
    active: list[Executor] = []  # programs so far that may still be given code
    expected: Executor | None = None  # the one whose code is the next operand
    for index, (previous, word) in enumerate(itertools.pairwise(["", *command])):
        expected = next((each for each in active if each.code.match(word)), expected)
        if expected is not None:
            yield word, expected.cure
        if expected is ENV and (words := _split(word)):
            yield from find_code([*words, *command[index + 1 :]])
            return
        if not word.startswith(("-", "+")) and not any(each.with_value.fullmatch(previous) for each in active):
            expected = None
            active = [each for each in active if each.is_after_operands]
        active += [each for each in EXECUTORS if each.name.fullmatch(Path(word).name)]


def _split(word: str) -> list[str]:
    """Return the words into which env divides its code; none for an option whose code is the next argument."""
    option = ENV.code.match(word)
    line = word[option.end() :].lstrip("=") if option else word
    with contextlib.suppress(ValueError):
        return shlex.split(line)
    return line.split()
