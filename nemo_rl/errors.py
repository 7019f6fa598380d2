"""The errors that this project raises, one type a boundary.

NemoRLError
├── ConfigError         a key of the configuration: raised before a model loads; CombinedConfigError: several
├── DataError           a dataset's file, row or template; UnusableRowError: one row of it
├── GenerationError     the engine did not answer a request (infra: retried)
├── EnvironmentContractError    an environment broke its contract or raised; UserExitError: it tried to end the run
├── PolicyError         the training backend
├── WeightSyncError     the engine does not hold the policy's weights
├── CheckpointError     a checkpoint that cannot be written or read
├── RecordError         metrics or rollouts that could not be written to the run directory
├── RolloutError        too many failed rollouts, or none that ever ends
├── JobError            a job that Slurm did not take
└── WorkerError         a process of ours failed; WorkerDied: it is gone; WorkerTimeout: it did not answer in time

What happens to one rollout is no exception: it is a `types.Failure` on its trajectory.
"""

import difflib
import os
from collections.abc import Iterable, Iterator, Sequence

MAX_LOGGED_CHARACTERS = 300
MIN_CONCEALED_CHARACTERS = 8  # shorter values from the environment are not replaced inside other text
MAX_SHOWN_CHARACTERS = 120  # characters shown of a configuration value that is no text
CONTROL_CHARACTERS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))} | {
    0x2028: "\\u2028",
    0x2029: "\\u2029",
    0x202E: "\\u202e",  # text after it is shown from right to left
}


class NemoRLError(Exception):
    """Base of all errors raised on purpose; its text is meant for the user, and shows no value of `conceal_value`."""

    def __str__(self) -> str:
        return conceal(super().__str__())


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
        super().__init__(f"{key} = {_show(value)}: {problem}{suggest_name(key, self.known, value)}")

    def under(self, prefix: str) -> "ConfigError":
        """Return the same error with `prefix` in front of its key."""
        return ConfigError(f"{prefix}.{self.key}", self.value, self.problem, known=self.known)


class CombinedConfigError(ConfigError):
    """Several problems of one configuration, grouped by their cause; key, value and problem are the first one's."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        first = errors[0]
        super().__init__(first.key, first.value, first.problem, known=first.known)
        self.errors = tuple(errors)
        groups: dict[str, list[ConfigError]] = {}
        for error in errors:
            groups.setdefault(error.problem, []).append(error)
        self.args = (f"{len(errors)} problems:\n" + "\n".join(map(_format_group, groups.values())),)


def describe_error(error: BaseException) -> str:
    """Return the first line of a library's error, with its type, for an error of ours."""
    lines = str(error).strip().splitlines()
    return escape(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)


_interpolations: dict[str, str] = {}  # by the value from the environment


def conceal_value(value: str, interpolation: str) -> None:
    """Show `interpolation` in place of a value from the environment, in errors and log lines of this process."""
    if value:
        _interpolations[value] = _interpolations[repr(value)[1:-1]] = interpolation  # also as other texts quote it


def interpolation_of(value: object) -> str | None:
    """Return the interpolation that stands for a value from the environment; None for any other value."""
    return _interpolations.get(value) if isinstance(value, str) else None


def conceal(text: str) -> str:
    """Return text with interpolations in place of values from the environment.

    Values shorter than MIN_CONCEALED_CHARACTERS would spoil other words, and those that are paths here are no secrets.
    """
    for value, interpolation in sorted(_interpolations.items(), key=lambda item: -len(item[0])):
        if len(value) >= MIN_CONCEALED_CHARACTERS and value in text and not os.path.exists(value):
            text = text.replace(value, interpolation)
    return text


def escape(text: str, limit: int = MAX_LOGGED_CHARACTERS) -> str:
    """Return a client's text for a log or a terminal: control characters as escapes, at most `limit` characters.

    Example: "a\\n\\x1b[2J" is "a\\\\x0a\\\\x1b[2J".
    """
    cut = text if len(text) <= limit else f"{text[:limit]}..."
    return cut.translate(CONTROL_CHARACTERS)


def flatten_config_errors(errors: Iterable[ConfigError]) -> Iterator[ConfigError]:
    """Yield the errors, those of a combined one each."""
    for error in errors:
        yield from error.errors if isinstance(error, CombinedConfigError) else (error,)


def raise_config_errors(errors: Iterable[ConfigError]) -> None:
    """Raise the problems of a configuration as one error, each once; do nothing if there are none."""
    unique = list({str(error): error for error in flatten_config_errors(errors)}.values())
    if unique:
        raise unique[0] if len(unique) == 1 else CombinedConfigError(unique)


def _format_group(errors: Sequence[ConfigError]) -> str:
    if len(errors) == 1:
        return f"  {errors[0]}"
    settings = ", ".join(f"{error.key} = {_show(error.value)}" for error in errors)
    return f"  {settings}: {errors[0].problem}"


def _show(value: object) -> str:
    """Return a value as an error shows it: both ends of a long one, since a path's last parts tell the most."""
    text = conceal(repr(interpolation_of(value) or value))
    limit = MAX_LOGGED_CHARACTERS if isinstance(value, str) else MAX_SHOWN_CHARACTERS
    if len(text) <= limit + 2:  # quotes
        return text
    half = limit // 2
    return f"{text[:half]}[... {len(text) - 2 * half} characters ...]{text[-half:]}"


class DataError(NemoRLError):
    """A dataset, row or chat template that cannot be used; the text names file:line if there is one."""


class UnusableRowError(DataError):
    """One row of a dataset that cannot be read; the others may be usable."""


class GenerationError(NemoRLError):
    """The generation engine failed a request, or died."""


class EnvironmentContractError(NemoRLError):
    """An environment broke its contract: a wrong number of results, a wrong type."""


class UserExitError(EnvironmentContractError):
    """An environment, reward function or scorer called `sys.exit` or raised KeyboardInterrupt."""


class PolicyError(NemoRLError):
    """The training backend cannot do what was asked."""


class WeightSyncError(NemoRLError):
    """The engine's weights are not the policy's."""


class CheckpointError(NemoRLError):
    """A checkpoint that cannot be written or read."""


class RecordError(NemoRLError):
    """Metrics or rollouts of a run that could not be written to its directory; its checkpoints are unaffected."""


class RolloutError(NemoRLError):
    """Rollouts cannot continue: too many failed, or nothing has progressed before the deadline."""


class JobError(NemoRLError):
    """Slurm did not take a job; the text has its own words."""


class WorkerError(NemoRLError):
    """A process of ours failed, died, or did not answer before its deadline."""


class WorkerTimeout(WorkerError):
    """A call that a process or thread of ours did not answer before its deadline."""


class WorkerDied(WorkerError):
    """The process itself is gone; what it was asked will never be answered."""

    def __init__(self, text: str, *, exit_status: int | None = None) -> None:
        """`exit_status`: that of the process, negative for the signal that ended it; None: unknown."""
        super().__init__(text)
        self.exit_status = exit_status


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
