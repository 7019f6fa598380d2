"""`nemo-rl VERB`: the table of verbs, and the entry point that imports the command of one and runs it."""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import nemo_rl
from nemo_rl.command_line import Command, ExitCode, run_command
from nemo_rl.errors import suggest_name

RECIPES = "nemo_rl.launch.recipe_commands"
# Words that people type for a verb, of other programs or of their own; a suggestion, never a command.
OTHER_WORDS = {
    "train": "grpo",
    "ppo": "grpo",
    "rl": "grpo",
    "distillation": "distill",
    "finetune": "sft",
    "evaluate": "eval",
    "test": "env",
    "generate": "collect",
    "rollout": "collect",
    "tensorboard": "view",
    "ui": "view",
    "diff": "compare",
    "lint": "check",
    "new": "init",
    "create": "init",
    "push": "export",
    "slurm": "submit",
    "resume": "run",
    "explain": "config",
    "list": "config",
}


@dataclass(frozen=True, slots=True)
class Verb:
    """A `Command` in a module that is imported only if the command is given."""

    module: str
    attribute: str
    summary: str

    @property
    def missing_package(self) -> str | None:
        """Return the package of the command if this installation lacks it: viewer, jobs and doctor may be deleted."""
        package = self.module.rpartition(".")[0]
        return package if importlib.util.find_spec(package) is None else None

    def load(self) -> Command:
        """Import the command."""
        command = getattr(importlib.import_module(self.module), self.attribute)
        assert isinstance(command, Command)
        return command


VERBS: dict[str, Verb] = {
    "grpo": Verb(RECIPES, "GRPO", "train a model with GRPO or one of its variants"),
    "distill": Verb(RECIPES, "DISTILL", "distil a teacher into a model, on the model's own samples"),
    "sft": Verb(RECIPES, "SFT", "train a model on conversations"),
    "dpo": Verb(RECIPES, "DPO", "train a model on preferences, without a reward model"),
    "rm": Verb(RECIPES, "RM", "train a reward model on preferences"),
    "eval": Verb(RECIPES, "EVAL", "pass@k of a model, optionally compared with another"),
    "collect": Verb(RECIPES, "COLLECT", "collect rollouts of a model over datasets"),
    "export": Verb("nemo_rl.trained.export_command", "EXPORT", "the model of a run as a Hugging Face directory"),
    "serve": Verb("nemo_rl.trained.serve_command", "SERVE", "the model of a run behind an OpenAI-compatible server"),
    "chat": Verb("nemo_rl.trained.chat_command", "CHAT", "talk to the model of a run in the terminal"),
    "view": Verb("nemo_rl.viewer.view_command", "VIEW", "show runs and collections in the browser"),
    "compare": Verb("nemo_rl.viewer.compare_command", "COMPARE", "compare runs or collections with the first of them"),
    "check": Verb("nemo_rl.viewer.check_command", "CHECK", "find problems of a run; recompute a step"),
    "trace": Verb("nemo_rl.trace.trace_command", "TRACE", "where the time of a run went, and which key moves it"),
    "plan": Verb("nemo_rl.trace.plan_command", "PLAN", "what a traced run would take with other values of its keys"),
    "merge": Verb("nemo_rl.collect.merge_command", "MERGE", "merge the shards of a collection"),
    "profile": Verb("nemo_rl.collect.profile_command", "PROFILE", "statistics of a collection, pass@k, a curriculum"),
    "run": Verb("nemo_rl.jobs.supervisor", "RUN", "run a training command; restart it when it dies or hangs"),
    "replicas": Verb("nemo_rl.launch.replicas", "REPLICAS", "list, add or remove engine replicas of a running job"),
    "submit": Verb("nemo_rl.jobs.submission", "SUBMIT", "run a collection or a training command as Slurm jobs"),
    "init": Verb("nemo_rl.launch.project", "INIT", "write a new project that trains without changes"),
    "doctor": Verb("nemo_rl.doctor.diagnosis", "DOCTOR", "check this machine and a recipe; suggest fixes"),
    "env": Verb("nemo_rl.doctor.environment_command", "ENV", "play an environment or reward function on some rows"),
    "config": Verb("nemo_rl.config.config_command", "CONFIG", "recipes by name, keys explained, NeMo-RL's translated"),
    "convert": Verb("nemo_rl.compat.convert_command", "CONVERT", "NeMo-RL's checkpoints as Hugging Face directories"),
    "constraints": Verb("nemo_rl.launch.project", "CONSTRAINTS", "the tested versions, for pip and uv"),
    "route": Verb("nemo_rl.jobs.server_router", "ROUTE", "one address for several OpenAI-compatible servers"),
}


def main() -> None:
    """Run the command of this process and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> ExitCode:
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(format_usage())
        return ExitCode.DONE if arguments else ExitCode.BAD_INPUT
    name, *rest = arguments
    if name == "--version":
        sys.stdout.write(f"nemo-rl {nemo_rl.__version__}\n")
        return ExitCode.DONE
    if name not in VERBS:
        meant = f"; did you mean {OTHER_WORDS[name]}?" if name in OTHER_WORDS else suggest_name(name, VERBS)
        sys.stderr.write(f"no such command: {name!r}{meant}\n{format_usage()}")
        return ExitCode.BAD_INPUT
    if package := VERBS[name].missing_package:
        sys.stderr.write(f"nemo-rl {name}: this installation lacks the package {package}\n")
        return ExitCode.BAD_INPUT
    return run_command(VERBS[name].load(), rest)


def format_usage() -> str:
    """Format the list of commands and the table of exit codes."""
    width = max(map(len, VERBS))
    lines = [f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items()]
    codes = [f"  {code:<{width}d}  {code.meaning}" for code in ExitCode]
    parts = ("usage: nemo-rl COMMAND ...", "", *lines, "", "exit codes:", *codes, "")
    return "\n".join((*parts, "Run nemo-rl COMMAND --help for its options.")) + "\n"
