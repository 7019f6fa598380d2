"""The model that a run has trained: the weights of one of its checkpoints, and what is known about them."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from nemo_rl.checkpoint import CONFIG_FILE, MANIFEST_FILE, Checkpoint, CheckpointStore, verify_checkpoint
from nemo_rl.command_line import path_argument
from nemo_rl.config.recipe_files import resolve_interpolations
from nemo_rl.config.shared_sections import CheckpointingConfig
from nemo_rl.errors import CheckpointError, ConfigError

METRICS_FILE = "metrics.jsonl"
WEIGHTS, ADAPTER = "policy/weights", "policy/adapter"  # directories of a checkpoint
POLICIES = "policy/adapters"  # a directory for each adapter by name, in a checkpoint of several policies
TOKENIZER = "policy/tokenizer"
POLICY_OPTION = "--policy"
CHECKPOINTS = "checkpoints"  # a directory of the run, unless `checkpointing.checkpoint_dir` is set


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A checkpoint's model, whole weights, an adapter or both, with the configuration that it was trained with."""

    checkpoint: Checkpoint
    config: Mapping[str, Any]
    run_dir: Path | None  # None: the checkpoint lies elsewhere, so there are no curves
    policy_name: str = ""  # the one that is meant in a run of several policies; empty: all of them

    @property
    def weights(self) -> Path:
        """Return the directory of weights and tokenizer; raises CheckpointError if there is none."""
        if not self.has_weights:
            raise CheckpointError(
                f"{self.checkpoint.path}/policy has no weights/ but adapters alone: train with save_merged=true, or "
                "merge them with peft"
            )
        return self.checkpoint.path / WEIGHTS

    @property
    def has_weights(self) -> bool:
        """Return whether the checkpoint has whole weights; else it has an adapter alone."""
        return (self.checkpoint.path / WEIGHTS).is_dir()

    @property
    def adapter(self) -> Path | None:
        """Return the directory of the adapter, in peft's format; None: all weights are trained, or several policies."""
        if self.policy_name:
            return self.checkpoint.path / POLICIES / self.policy_name
        return _adapter_of(self.checkpoint.path)

    @property
    def own_adapters(self) -> dict[str, Path]:
        """Return the checkpoint's adapters by name: that which `name` gives, followed by the policy's of several.

        Example: "exp_001-step_150", or "exp_001-step_150-first" and "exp_001-step_150-second".
        """
        return self._adapters_of(self.checkpoint.path)

    @property
    def adapters(self) -> dict[str, Path]:
        """Return the adapters of all the run's checkpoints by name, first step first."""
        steps = sorted(self.checkpoint.path.parent.glob("step_*"), key=lambda path: (len(path.name), path.name))
        found = (self._adapters_of(path) for path in steps if (path / MANIFEST_FILE).is_file())
        return {name: adapter for own in found for name, adapter in own.items()}

    def _adapters_of(self, checkpoint: Path) -> dict[str, Path]:
        name = self._name_of(checkpoint)
        if (only := _adapter_of(checkpoint)) is not None:
            return {name: only}
        found = sorted((checkpoint / POLICIES).glob(self.policy_name or "*"))
        return {f"{name}-{path.name}": path for path in found}

    @property
    def name(self) -> str:
        """Return a name for people and servers: run and step, and the policy if one of several is meant.

        Example: `runs/exp_001/checkpoints/step_150` is "exp_001-step_150".
        """
        return self.name_of_policy(self.policy_name) if self.policy_name else self._name_of(self.checkpoint.path)

    def name_of_policy(self, policy: str) -> str:
        """Return the name of the adapter of one of several policies, as in `own_adapters`."""
        return f"{self._name_of(self.checkpoint.path)}-{policy}"

    def of_policy(self, name: str | None) -> "TrainedModel":
        """Return the model of one of several policies, or of the only one (None).

        Raises ConfigError if there is no policy of that name, or none is named and there are several.
        """
        known = [path.name for path in sorted((self.checkpoint.path / POLICIES).glob("*"))]
        if name is None and not known:
            return self
        if name not in known:
            problem = (
                "the run has several policies: choose one" if known else "the run has a single policy; allowed: none"
            )
            raise ConfigError(POLICY_OPTION, name, problem, known=known)
        return replace(self, policy_name=name)

    def _name_of(self, checkpoint: Path) -> str:
        place = self.run_dir or self.checkpoint.path.parent
        return f"{place.resolve().name}-{checkpoint.resolve().name}"

    @property
    def policy(self) -> Mapping[str, Any]:
        """Return the section `policy` of the run."""
        section = self.config.get("policy")
        return section if isinstance(section, Mapping) else {}


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `chosen_model` reads."""
    parser.add_argument("run", type=path_argument, metavar="RUN", help="a run directory, or a checkpoint (step_N)")
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="the checkpoint of step N; default: the best, by checkpointing.metric_name",
    )


def add_policy_argument(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names one of several policies; `chosen_policy` reads it."""
    parser.add_argument(POLICY_OPTION, metavar="NAME", help="the one to take of a run of several policies")


def chosen_policy(parsed: argparse.Namespace) -> TrainedModel:
    """Return the model of `chosen_model`, that of one policy if the run has several; raises as `of_policy` does."""
    return chosen_model(parsed).of_policy(parsed.policy)


def chosen_model(parsed: argparse.Namespace) -> TrainedModel:
    """Return the model that the command line names; raises ConfigError, or CheckpointError for a damaged one."""
    return find_trained_model(parsed.run, step=parsed.step)


def find_trained_model(path: Path, *, step: int | None = None) -> TrainedModel:
    """Return the model of a run directory, a directory of checkpoints or a checkpoint, whose files are verified.

    Raises:
        ConfigError: there is none, or none of `step`.
        CheckpointError: its files are not as they were written.
    """
    if (path / MANIFEST_FILE).is_file():
        if step is not None:
            raise ConfigError("--step", step, f"{path} is a checkpoint itself; allowed with a run directory")
        checkpoint = path
    else:
        checkpoint = _choose(path, step)
    return TrainedModel(verify_checkpoint(checkpoint), _read_config(checkpoint), _run_directory(checkpoint, path))


def _choose(path: Path, step: int | None) -> Path:
    """Return the checkpoint of `step`, or the best one, of a run or of a directory of checkpoints."""
    config = _read_config(path) if (path / CONFIG_FILE).is_file() else {}
    section = _checkpointing(config, path)
    directory = _checkpoint_directory(section, path) if config else path
    store = CheckpointStore(section, directory)
    found = {checkpoint.step: checkpoint.path for checkpoint in store.checkpoints()}
    if not found:
        raise ConfigError(
            "RUN", str(path), "has no checkpoint: expected a run with checkpointing.enabled=true, or step_N"
        )
    if step is not None and step not in found:
        raise ConfigError(
            "--step", step, f"there is no such checkpoint in {directory}; known: {', '.join(map(str, found))}"
        )
    best = store.best()
    assert best is not None
    chosen = best.path if step is None else found[step]
    if config and _base_model(_read_config(chosen)) != _base_model(config):  # a relative checkpoint_dir, from elsewhere
        raise ConfigError("RUN", str(path), f"{chosen} is of a run of another model: name the checkpoint itself")
    return chosen


def _checkpointing(config: Mapping[str, Any], path: Path) -> CheckpointingConfig:
    """Return the section of a run; without a configuration that of the newest checkpoint, whose metric ranks them."""
    newest = max(path.glob(f"step_*/{CONFIG_FILE}"), key=lambda file: file.stat().st_mtime, default=None)
    values = config or (_read_config(newest.parent) if newest is not None else {})
    try:
        return CheckpointingConfig.model_validate(values.get("checkpointing") or {})
    except ValidationError as error:
        raise CheckpointError(
            f"{path}: the section checkpointing of its {CONFIG_FILE} cannot be read: {error}"
        ) from error


def _adapter_of(checkpoint: Path) -> Path | None:
    directory = checkpoint / ADAPTER
    return directory if directory.is_dir() else None


def _base_model(config: Mapping[str, Any]) -> object:
    policy = config.get("policy")
    return policy.get("model_name") if isinstance(policy, Mapping) else None


def _checkpoint_directory(section: CheckpointingConfig, run_dir: Path) -> Path:
    """Return the directory of a run's checkpoints; its text may refer to environment variables."""
    if not section.checkpoint_dir:
        return run_dir / CHECKPOINTS
    return Path(resolve_interpolations({"checkpoint_dir": section.checkpoint_dir})["checkpoint_dir"])


def _run_directory(checkpoint: Path, named: Path) -> Path | None:
    candidates = (named, checkpoint.resolve().parent.parent)
    return next((directory for directory in candidates if (directory / METRICS_FILE).is_file()), None)


def _read_config(directory: Path) -> dict[str, Any]:
    file = directory / CONFIG_FILE
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{file} holds no configuration")
    return values
