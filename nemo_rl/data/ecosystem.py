"""Datasets of environments of the ecosystem: the tasks of a verifiers taskset, and directories of Harbor tasks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_rl.config.data import DatasetConfig, DatasetEntry
from nemo_rl.data.rows import Row
from nemo_rl.data.sources import require_data_path
from nemo_rl.errors import ConfigError

TASK_FILE, INSTRUCTION_FILE = "task.toml", "instruction.md"  # of a Harbor task's directory


def _check_verifiers(key: str, section: DatasetConfig, config: Any) -> None:
    if section.task is None:
        raise ConfigError(f"{key}.task", None, "required by dataset_name: verifiers, the id of its taskset")


def _read_taskset(section: DatasetConfig, seed: int) -> Iterator[Row]:
    """Yield a row of each task, without end for an endless taskset: its messages, its place, and its key.

    `task` is the id of the taskset, `task_kwargs` the other keys of its section.
    """
    from verifiers.v1.utils.loaders import load_taskset, taskset_config_type  # pyright: ignore[reportMissingImports]

    try:
        kind = taskset_config_type(section.task or "")
        taskset = load_taskset(kind.model_validate({**section.task_kwargs, "id": section.task}))
    except Exception as error:  # a plug-in's module, or pydantic's
        raise ConfigError("task", section.task, f"verifiers refuses it: {error}") from error
    if section.size is None and not taskset.bounded:
        raise ConfigError("size", None, "required: the taskset is endless")
    for task in taskset:
        data = task.data
        messages = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        messages.append({"role": "user", "content": data.prompt_text or data.name or task.key})
        yield {"messages": messages, "task_index": data.idx, "task_key": task.key}


def find_task_directories(root: Path) -> list[Path]:
    """Return the directories under `root`, or `root` itself, that hold a Harbor task, sorted."""
    return sorted(file.parent for file in root.rglob(TASK_FILE) if (file.parent / INSTRUCTION_FILE).is_file())


def _check_harbor(key: str, section: DatasetConfig, config: Any) -> None:
    path = require_data_path(section, f"{key}.data_path")
    if not find_task_directories(Path(path)):
        problem = f"no directory in it has both {TASK_FILE} and {INSTRUCTION_FILE}"
        raise ConfigError(f"{key}.data_path", path, problem)


def _read_task_directories(section: DatasetConfig, seed: int) -> Iterator[Row]:
    """Yield a row of each task directory under `data_path`: its instruction, and where it is."""
    for directory in find_task_directories(Path(require_data_path(section))):
        instruction = (directory / INSTRUCTION_FILE).read_text(encoding="utf-8").strip()
        yield {"messages": [{"role": "user", "content": instruction}], "task_directory": str(directory.resolve())}


VERIFIERS = DatasetEntry(DatasetConfig, make=_read_taskset, check=_check_verifiers, env_name="verifiers")
HARBOR = DatasetEntry(DatasetConfig, make=_read_task_directories, check=_check_harbor, env_name="harbor")
