"""The errors that this project raises, one type a boundary.

NemoRLError
├── ConfigError         a key of the configuration: raised before a model loads
├── DataError           a dataset's file, row or template
├── GenerationError     the engine did not answer a request (infra: retried)
├── EnvironmentContractError    an environment broke its contract or raised
├── PolicyError         the training backend
├── WeightSyncError     the engine does not hold the policy's weights
├── CheckpointError     a checkpoint that cannot be written or read
├── RolloutError        too many failed rollouts, or none that ever ends
├── JobError            a job that Slurm did not take
└── WorkerError         a process of ours failed or did not answer; WorkerDied: it is gone

What happens to one rollout is no exception: it is a `types.Failure` on its trajectory.
"""

import difflib
from collections.abc import Iterable


class NemoRLError(Exception):
    """Base of all errors raised on purpose; its text is meant for the user."""


class ConfigError(NemoRLError):
    """A configuration that cannot run.

    The text names the key, the value and what would be right:

    Example: `ConfigError("grpo.num_prompt_per_step", 4, "unknown key", known=["num_prompts_per_step"])` reads
    "grpo.num_prompt_per_step = 4: unknown key; did you mean grpo.num_prompts_per_step?"
    """

    def __init__(self, key: str, value: object, problem: str, *, known: Iterable[str] = ()) -> None:
        self.key = key
        self.value = value
        self.problem = problem
        self.known = tuple(known)
        super().__init__(f"{key} = {value!r}: {problem}{suggest_name(key, self.known, value)}")

    def under(self, prefix: str) -> "ConfigError":
        """Return the same error with `prefix` in front of its key."""
        return ConfigError(f"{prefix}.{self.key}", self.value, self.problem, known=self.known)


class DataError(NemoRLError):
    """A dataset, row or chat template that cannot be used; the text names file:line where there is one."""


class GenerationError(NemoRLError):
    """The generation engine failed a request, or died."""


class EnvironmentContractError(NemoRLError):
    """An environment broke its contract: a wrong number of results, a wrong type."""


class PolicyError(NemoRLError):
    """The training backend cannot do what was asked."""


class WeightSyncError(NemoRLError):
    """The engine's weights are not the policy's."""


class CheckpointError(NemoRLError):
    """A checkpoint that cannot be written or read."""


class RolloutError(NemoRLError):
    """Rollouts cannot continue: too many failed, or nothing has progressed before the deadline."""


class JobError(NemoRLError):
    """Slurm did not take a job; the text has its own words."""


class WorkerError(NemoRLError):
    """A process of ours died, or did not answer before its deadline."""


class WorkerDied(WorkerError):
    """The process itself is gone; what it was asked will never be answered."""


def suggest_name(key: str, known: Iterable[str], value: object = None) -> str:
    """Return the end of an error's sentence: the known name nearest to the key's last part or to a text, else all."""
    names = sorted(known)
    if not names:
        return ""
    prefix, _, name = key.rpartition(".")
    if nearest := difflib.get_close_matches(name, names, n=1, cutoff=0.6):
        return f"; did you mean {prefix + '.' if prefix else ''}{nearest[0]}?"
    if isinstance(value, str) and (nearest := difflib.get_close_matches(value, names, n=1, cutoff=0.6)):
        return f"; did you mean {nearest[0]!r}?"
    return f"; known: {', '.join(names)}"


def summarize_error(error: BaseException) -> str:
    """Return an error's type and the first line of its text: the cause of a failure."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
