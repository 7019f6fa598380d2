"""Names of models in a configuration, checked before torch loads: what is written as a path must lead to a model."""

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from nemo_rl.config.collect import SampledRunConfig
from nemo_rl.config.evaluation import EvalRunConfig
from nemo_rl.config.master import RolloutRunConfig, TrainingRunConfig
from nemo_rl.config.policy import TeacherConfig
from nemo_rl.config.reward_model import RewardModelRunConfig
from nemo_rl.config.scorers import RewardModelScorerConfig
from nemo_rl.config.sft import SFTRunConfig
from nemo_rl.errors import ConfigError

QUICKSTART_MODEL = "nemo_rl/quickstart"  # "-N" after it: made from seed N
QUICKSTART_TEACHER = "nemo_rl/quickstart-teacher"  # likewise
QUICKSTART_PAIRS_TEACHER = "nemo_rl/quickstart-pairs-teacher"  # likewise; its tokenizer is another
_QUICKSTART = re.compile(r"nemo_rl/(quickstart(?:-teacher|-pairs-teacher)?)(?:-([0-9]+))?")
MODEL_FILE = "config.json"  # every Hugging Face model has it

AnyConfig: TypeAlias = TrainingRunConfig | SFTRunConfig | SampledRunConfig | RewardModelRunConfig


def quickstart_model(key: str, model_name: str) -> tuple[str, int] | None:
    """Which of the quickstart's models a name means, and from which seed; None: the name is not one of ours.

    Raises ConfigError for a name that begins like one of ours.
    """
    if not model_name.startswith(QUICKSTART_MODEL):
        return None
    match = _QUICKSTART.fullmatch(model_name)
    if match is None:
        names = f"{QUICKSTART_MODEL}, {QUICKSTART_TEACHER}, {QUICKSTART_PAIRS_TEACHER}"
        raise ConfigError(key, model_name, f"allowed: {names}, or {QUICKSTART_MODEL}-N for a seed N")
    return match[1], int(match[2] or 0)


def checkpoint_weights(name: str) -> Path | None:
    """The Hugging Face folder in a run's checkpoint; None for what is no checkpoint."""
    weights = Path(name) / "policy" / "weights"
    return weights if weights.is_dir() else None


def check_model_names(config: AnyConfig) -> None:
    """Raise ConfigError for the first model that cannot be there. Names on the hub pass: loading tells of them."""
    is_served = isinstance(config, SampledRunConfig) and config.server.address is not None
    if not is_served:  # a server may call its model as it likes
        check_model_name("policy.model_name", config.policy.model_name)
        if config.policy.tokenizer.name is not None:
            check_directory("policy.tokenizer.name", config.policy.tokenizer.name)
    if isinstance(config, EvalRunConfig) and config.eval.baseline is not None:
        check_model_name("eval.baseline", config.eval.baseline)
    if isinstance(config, TrainingRunConfig):
        for key, section in config.teacher_sections.items():
            _check_teacher(key, section)
    if isinstance(config, RolloutRunConfig):
        for name, scorer in config.scorers.items():
            if isinstance(scorer, RewardModelScorerConfig):
                check_model_name(f"scorers.{name}.model_name", scorer.model_name)


def _check_teacher(key: str, section: TeacherConfig) -> None:
    """Of one behind a server the tokenizer alone is loaded here."""
    if section.server is None:
        check_model_name(f"{key}.model_name", section.model_name)
    elif section.tokenizer.name is None:
        check_directory(f"{key}.model_name", section.model_name)
    if section.tokenizer.name is not None:
        check_directory(f"{key}.tokenizer.name", section.tokenizer.name)


def check_model_name(key: str, name: str) -> None:
    """Raise ConfigError for a path that leads to no model, neither in a Hugging Face folder nor in a checkpoint."""
    with _translate_os_errors(key, name):
        if quickstart_model(key, name) is not None or checkpoint_weights(name) is not None:
            return
        check_directory(key, name)
        folder = Path(name)
        if not folder.is_dir() or (folder / MODEL_FILE).is_file():
            return
        checkpoints = [str(path) for path in folder.glob("step_*")]
    raise ConfigError(key, name, f"the folder has no {MODEL_FILE}, so it is no model", known=checkpoints)


def check_directory(key: str, name: str) -> None:
    """Raise ConfigError for what is written as a path and is no folder."""
    folder = Path(name)
    with _translate_os_errors(key, name):
        if folder.is_dir() or not _is_path(name):
            return
        problem = "is no folder" if folder.exists() else "there is no such folder"
        similar = _closest_sibling(folder)
    expected = "a folder of a model, or a name on the hub (organisation/name), was expected"
    raise ConfigError(key, name, f"{problem}; {expected}", known=similar)


@contextmanager
def _translate_os_errors(key: str, name: str) -> Iterator[None]:
    """A path that this user may not look into, or that is too long, is a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(key, name, f"cannot be read: {error.strerror}") from error


def _is_path(name: str) -> bool:
    """A name on the hub has at most one slash, within it, and begins with a letter or digit."""
    return name.startswith(("/", ".", "~")) or name.endswith("/") or name.count("/") > 1


def _closest_sibling(folder: Path) -> list[str]:
    """The folder beside it that is spelt most alike."""
    beside = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
    return [str(folder.parent / name) for name in difflib.get_close_matches(folder.name, beside, n=1)]
