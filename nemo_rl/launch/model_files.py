"""Models by their files, before torch loads: a name must lead to a model, and config.json has its sizes."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from nemo_rl.config.collect import EvalRunConfig, SampledRunConfig
from nemo_rl.config.environment import ModelScorerConfig
from nemo_rl.config.master import GRPORunConfig, RolloutRunConfig, TrainingRunConfig
from nemo_rl.config.policy import TeacherConfig
from nemo_rl.config.supervised_runs import RewardModelRunConfig, SupervisedRunConfig
from nemo_rl.distributed.machine import cache_directory
from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.policy.memory import ModelShape, UnknownShapeError
from nemo_rl.weight_sync.adapters import MAX_RANK

if TYPE_CHECKING:
    from nemo_rl.policy.adapter_files import AdapterDescription

QUICKSTART_MODEL = "nemo_rl/quickstart"  # "-N" after it: made from seed N
QUICKSTART_EXPERTS = "nemo_rl/quickstart-moe"  # also with "-N"; a mixture of experts
QUICKSTART_TEACHER = "nemo_rl/quickstart-teacher"  # also with "-N"
QUICKSTART_PAIRS_TEACHER = "nemo_rl/quickstart-pairs-teacher"  # also with "-N"; its tokenizer differs
QUICKSTART_VISION = "nemo_rl/quickstart-vision"  # also with "-N"; reads images, and its weights are random
_QUICKSTART = re.compile(r"nemo_rl/(quickstart(?:-moe|-teacher|-pairs-teacher|-vision)?)(?:-([0-9]+))?")
MODEL_FILE = "config.json"  # every Hugging Face model has it

AnyConfig: TypeAlias = TrainingRunConfig | SupervisedRunConfig | SampledRunConfig | RewardModelRunConfig


def quickstart_model(key: str, model_name: str) -> tuple[str, int] | None:
    """Return which of the quickstart's models a name means and its seed; None for any other name.

    Raises ConfigError for a name that begins like one of them but is not.
    """
    if not model_name.startswith(QUICKSTART_MODEL):
        return None
    match = _QUICKSTART.fullmatch(model_name)
    if match is None:
        kinds = (QUICKSTART_EXPERTS, QUICKSTART_TEACHER, QUICKSTART_PAIRS_TEACHER, QUICKSTART_VISION)
        names = ", ".join((QUICKSTART_MODEL, *kinds))
        raise ConfigError(key, model_name, f"allowed: {names}, or {QUICKSTART_MODEL}-N for a seed N")
    return match[1], int(match[2] or 0)


def checkpoint_weights(name: str) -> Path | None:
    """Return the Hugging Face directory in a run's checkpoint; None for anything but a checkpoint."""
    weights = Path(name) / "policy" / "weights"
    return weights if weights.is_dir() else None


def check_model_names(config: AnyConfig) -> None:
    """Raise ConfigError for the first model that cannot exist. Names on the hub pass; loading reports those."""
    is_served = isinstance(config, SampledRunConfig) and config.server.address is not None
    if not is_served:  # a server may give its model any name
        check_model_name("policy.model_name", config.policy.model_name)
        _check_adapters(config)
        if config.policy.tokenizer.name is not None:
            check_directory("policy.tokenizer.name", config.policy.tokenizer.name)
    if isinstance(config, EvalRunConfig) and config.eval.baseline not in (None, *config.server.adapters):
        check_model_name("eval.baseline", config.eval.baseline)
    if isinstance(config, TrainingRunConfig):
        for key, section in config.teacher_sections.items():
            _check_teacher(key, section)
    if isinstance(config, RolloutRunConfig):
        for name, scorer in config.scorers.items():
            if isinstance(scorer, ModelScorerConfig):
                check_model_name(f"scorers.{name}.model_name", scorer.model_name)


def adapter_ranks(config: SampledRunConfig) -> dict[str, int]:
    """Return the ranks of `server.adapters` by name; raises ConfigError for a directory that holds no plain LoRA."""
    ranks = {}
    for name, directory in config.server.adapters.items():
        key = f"server.adapters.{name}"
        ranks[name] = _described(key, directory).rank
        if ranks[name] > MAX_RANK:
            raise ConfigError(key, directory, f"its rank is {ranks[name]}, and vLLM's adapters have at most {MAX_RANK}")
    return ranks


def _check_adapters(config: AnyConfig) -> None:
    if isinstance(config, SampledRunConfig):
        adapter_ranks(config)
    elif isinstance(config, GRPORunConfig):
        _check_starting_adapters(config)


def _check_starting_adapters(config: GRPORunConfig) -> None:
    """Raise ConfigError for the adapter of a policy to start from that is missing, or of another `dim` or `alpha`."""
    section, policy = config.policy.parallelism.adapter_section, config.policy
    for name, own in config.policies.items():
        if own.adapter_path is None or section is None:
            continue
        key = f"policies.{name}.adapter_path"
        found = _described(key, own.adapter_path)
        if (found.rank, found.alpha) != (section.dim, section.alpha):
            lora = f"policy.{policy.backend_key}.{policy.parallelism.ADAPTER_KEY}"
            problem = f"has dim {found.rank} and alpha {found.alpha:g}; {lora} has {section.dim} and {section.alpha}"
            raise ConfigError(key, own.adapter_path, problem)


def _described(key: str, directory: str) -> "AdapterDescription":
    from nemo_rl.policy.adapter_files import describe_adapter  # loads torch, which other runs here need not

    try:
        return describe_adapter(adapter_directory(directory))
    except CheckpointError as error:
        raise ConfigError(key, directory, str(error)) from error


def adapter_directory(name: str) -> Path:
    """Return the directory of an adapter's files; for a run's checkpoint `step_N`, of the adapter in it."""
    own = Path(name) / "policy" / "adapter"
    return own if own.is_dir() else Path(name)


def _check_teacher(key: str, section: TeacherConfig) -> None:
    """Check the model of a teacher; of a served one only the tokenizer is loaded here."""
    if section.server is None:
        check_model_name(f"{key}.model_name", section.model_name)
    elif section.tokenizer.name is None:
        check_directory(f"{key}.model_name", section.model_name)
    if section.tokenizer.name is not None:
        check_directory(f"{key}.tokenizer.name", section.tokenizer.name)


def check_model_name(key: str, name: str) -> None:
    """Raise ConfigError for a path without a model, neither a Hugging Face directory nor a checkpoint."""
    with _translate_os_errors(key, name):
        if quickstart_model(key, name) is not None or checkpoint_weights(name) is not None:
            return
        check_directory(key, name)
        directory = Path(name)
        if not directory.is_dir() or (directory / MODEL_FILE).is_file():
            return
        checkpoints = [str(path) for path in directory.glob("step_*")]
    raise ConfigError(key, name, f"the directory has no {MODEL_FILE}, so it is not a model", known=checkpoints)


def check_directory(key: str, name: str) -> None:
    """Raise ConfigError for a name written as a path that is not a directory."""
    path = Path(name)
    with _translate_os_errors(key, name):
        if path.is_dir() or not _is_path(name):
            return
        problem = "is not a directory" if path.exists() else "there is no such directory"
        similar = _closest_sibling(path)
    expected = "expected the directory of a model, or a name on the hub (organisation/name)"
    raise ConfigError(key, name, f"{problem}; {expected}", known=similar)


@contextmanager
def _translate_os_errors(key: str, name: str) -> Iterator[None]:
    """Turn an OSError, e.g. of a path that is too long or not permitted, into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(key, name, f"cannot be read: {error.strerror}") from error


def _is_path(name: str) -> bool:
    """Return whether a name is a path: a hub name has at most one inner slash and begins with a letter or digit."""
    return name.startswith(("/", ".", "~")) or name.endswith("/") or name.count("/") > 1


def _closest_sibling(directory: Path) -> list[str]:
    """Return the sibling directory with the most similar name."""
    parent = directory.parent
    names = [path.name for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
    return [str(parent / name) for name in difflib.get_close_matches(directory.name, names, n=1)]


def find_shape(key: str, model_name: str, overrides: Mapping[str, Any] | None = None) -> ModelShape:
    """Return the shape of a model whose config.json is on this machine; nothing is downloaded.

    Raises:
        UnknownShapeError: it is not here, or it describes a model of another kind.
    """
    path = _config_file(key, model_name)
    if path is None:
        cure = "" if _is_path(model_name) else f"; get it with: hf download {model_name} {MODEL_FILE}"
        raise UnknownShapeError(f"{MODEL_FILE} of {model_name} is not on this machine{cure}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnknownShapeError(f"{path} cannot be read: {error}") from error
    return ModelShape.from_config(model_name, {**values, **(overrides or {})})


def read_model_config(key: str, model_name: str) -> dict[str, Any] | None:
    """Return a model's config.json if it is on this machine; nothing is downloaded."""
    try:
        path = _config_file(key, model_name)
        values = None if path is None else json.loads(path.read_text(encoding="utf-8"))
    except (UnknownShapeError, OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def _config_file(key: str, model_name: str) -> Path | None:
    made = quickstart_model(key, model_name)
    if made is not None:
        path = cache_directory() / f"{made[0]}-{made[1]}" / MODEL_FILE
        if not path.is_file():
            raise UnknownShapeError(f"{model_name} is made at its first use")
        return path
    directory = checkpoint_weights(model_name) or Path(model_name)
    if directory.is_dir():
        return directory / MODEL_FILE
    if _is_path(model_name):
        return None
    from huggingface_hub import try_to_load_from_cache  # half a second that a local model need not wait

    found = try_to_load_from_cache(model_name, MODEL_FILE)
    return Path(found) if isinstance(found, str) else None
