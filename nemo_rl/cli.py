"""`nemo-rl VERB`: a table of the verbs, and the entry point that loads the command of one and runs it."""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl.commands import Command, ExitCode, run_command
from nemo_rl.errors import suggest_name


@dataclass(frozen=True, slots=True)
class Verb:
    """A `Command` in a module that is imported only when the command is given."""

    module: str
    attribute: str
    summary: str

    def load(self) -> Command:
        """Import the command."""
        command = getattr(importlib.import_module(self.module), self.attribute)
        assert isinstance(command, Command)
        return command


VERBS: dict[str, Verb] = {
    "collect": Verb("nemo_rl.launch.commands", "COLLECT", "collect rollouts of a model over datasets"),
    "merge": Verb("nemo_rl.collect.commands", "MERGE", "join the shards of a collection"),
    "profile": Verb("nemo_rl.collect.commands", "PROFILE", "statistics of a collection, pass@k, a curriculum"),
    "submit": Verb("nemo_rl.launch.submit", "SUBMIT", "run a collection as Slurm jobs"),
    "route": Verb("nemo_rl.collect.slurm.router", "ROUTE", "one address for several OpenAI-compatible servers"),
}


def main() -> None:
    """Run the command of this process and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> ExitCode:
    """Run one command and return its exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(format_usage())
        return ExitCode.DONE if arguments else ExitCode.BAD_INPUT
    name, *rest = arguments
    if name not in VERBS:
        sys.stderr.write(f"no such command: {name!r}{suggest_name(name, VERBS)}\n{format_usage()}")
        return ExitCode.BAD_INPUT
    return run_command(VERBS[name].load(), rest)


def format_usage() -> str:
    """Format the list of commands and the table of exit codes."""
    width = max(map(len, VERBS))
    lines = [f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items()]
    codes = [f"  {code:<{width}d}  {code.meaning}" for code in ExitCode]
    parts = ("usage: nemo-rl COMMAND ...", "", *lines, "", "exit codes:", *codes, "")
    return "\n".join((*parts, "Run nemo-rl COMMAND --help for its options.")) + "\n"
