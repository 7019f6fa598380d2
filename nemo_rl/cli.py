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
    "grpo": Verb("nemo_rl.launch.commands", "GRPO", "train a model with GRPO or a relative of it"),
    "distill": Verb("nemo_rl.launch.commands", "DISTILL", "distil a teacher into a model, on the model's own samples"),
    "sft": Verb("nemo_rl.launch.commands", "SFT", "train a model on conversations"),
    "dpo": Verb("nemo_rl.launch.commands", "DPO", "train a model on preferences, without a reward model"),
    "rm": Verb("nemo_rl.launch.commands", "RM", "train a reward model on preferences"),
    "eval": Verb("nemo_rl.launch.commands", "EVAL", "pass@k of a model, optionally compared with another"),
    "collect": Verb("nemo_rl.launch.commands", "COLLECT", "collect rollouts of a model over datasets"),
    "view": Verb("nemo_rl.viewer.commands", "VIEW", "look at runs and collections in the browser"),
    "compare": Verb("nemo_rl.viewer.commands", "COMPARE", "compare runs or collections with the first of them"),
    "check": Verb("nemo_rl.viewer.commands", "CHECK", "look for what is wrong with a run; recompute a step"),
    "merge": Verb("nemo_rl.collect.commands", "MERGE", "join the shards of a collection"),
    "profile": Verb("nemo_rl.collect.commands", "PROFILE", "statistics of a collection, pass@k, a curriculum"),
    "run": Verb("nemo_rl.jobs.supervisor", "RUN", "run a training command, restarted when it dies or hangs"),
    "replicas": Verb("nemo_rl.launch.replicas", "REPLICAS", "engines of a run that trains: show, add, remove"),
    "submit": Verb("nemo_rl.jobs.submission", "SUBMIT", "run a collection or a training command as Slurm jobs"),
    "init": Verb("nemo_rl.launch.project", "INIT", "write a project of your own that trains as it is"),
    "doctor": Verb("nemo_rl.doctor.diagnosis", "DOCTOR", "faults of this machine and of a recipe, with their cures"),
    "config": Verb("nemo_rl.config.commands", "CONFIG", "recipes by name, every key explained, NeMo-RL's translated"),
    "constraints": Verb("nemo_rl.launch.project", "CONSTRAINTS", "the tested versions, for pip and uv"),
    "route": Verb("nemo_rl.jobs.router", "ROUTE", "one address for several OpenAI-compatible servers"),
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
