"""Facts for `nemo-rl doctor` about a recipe: whether it can be resolved, and the files and servers that it names.

Measures, and judges nothing; models are looked at by their files, and none is loaded.
"""

import asyncio
import contextlib
import functools
import json
import logging
import os
import socket
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nemo_rl.config.config_command import verb_of
from nemo_rl.config.data import infer_dataset_name
from nemo_rl.data.rows import read_jsonl
from nemo_rl.errors import CombinedConfigError, ConfigError, DataError, NemoRLError
from nemo_rl.launch.model_files import MODEL_FILE, QUICKSTART_MODEL, checkpoint_weights
from nemo_rl.launch.recipe_commands import output_directories, vllm_key
from nemo_rl.recipes import find_recipe

TIMEOUT_S = 3.0  # deadline of one question to the driver or to a server
MAX_ROWS = 2000  # rows read per data file
HUB = "https://huggingface.co"
PROXIES = ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One model of a recipe, by its files."""

    name: str
    missing_files: tuple[str, ...] = ()
    damaged_files: tuple[str, ...] = ()  # weights shorter or longer than their header says
    needs_download: bool = False
    lacks_template: bool = False


@dataclass(frozen=True, slots=True)
class RecipeFacts:
    """A recipe, and the files that it names."""

    config_errors: tuple[str, ...] = ()
    num_gpus: int = 0  # 0: the recipe asks for none
    needs_cuda: bool = False  # policy.device: cuda, on this machine
    needs_vllm: bool = True
    models: Mapping[str, ModelFacts] = field(default_factory=dict)  # by key
    data_problems: Mapping[str, str] = field(default_factory=dict)  # by file
    gym_problems: Mapping[str, str] = field(default_factory=dict)  # by key
    run_errors: tuple[str, ...] = ()  # errors that would end the run before a model loads
    run_warnings: tuple[str, ...] = ()  # warnings of its start
    memory_problems: tuple[str, ...] = ()  # parts that fit on no device that the recipe may run on
    environment_problems: Mapping[str, str] = field(default_factory=dict)  # user code that fails, by key
    closed_servers: Mapping[str, str] = field(default_factory=dict)  # addresses that do not answer, by key
    hub_answers: bool = True
    asks_wandb: bool = False
    asks_tensorboard: bool = False
    asks_megatron: bool = False


def probe_recipe(name: str, overrides: Sequence[str]) -> RecipeFacts:
    """Load a recipe, and look at what it names; its own environments and reward functions are called on a few rows."""
    from nemo_rl.config import loading

    try:
        path = find_recipe(name)
        config: Any = loading.LOADERS[verb_of(path)](path, overrides)
    except CombinedConfigError as error:
        return RecipeFacts(config_errors=tuple(map(str, error.errors)))
    except ConfigError as error:
        return RecipeFacts(config_errors=(str(error),))
    values = config.model_dump()
    logger, cluster, policy = values.get("logger", {}), values.get("cluster", {}), values["policy"]
    errors = tuple(_path_errors(config))
    models = {key: model for key, model in _models(values) if not any(error.startswith(key) for error in errors)}
    facts = RecipeFacts(
        config_errors=errors,
        num_gpus=int(cluster.get("gpus_per_node", 0)),
        needs_cuda=policy.get("device") == "cuda" and not cluster.get("address"),
        needs_vllm=vllm_key(config) is not None,
        models=models,
        data_problems=dict(_data_problems(values.get("data", {}))),
        gym_problems=dict(_gym_problems(values.get("env", {}))),
        closed_servers=dict(_closed_servers(values)),
        hub_answers=_hub_answers() if any(model.needs_download for model in models.values()) else True,
        asks_wandb=bool(logger.get("wandb_enabled")),
        asks_tensorboard=bool(logger.get("tensorboard_enabled")),
        asks_megatron=bool(policy.get("megatron_cfg", {}).get("enabled")),
    )
    has_faults = bool(facts.config_errors or facts.data_problems)
    return facts if has_faults else _resolve(config, facts)


def _path_errors(config: Any) -> Iterator[str]:
    """Yield the errors of models that cannot exist and of directories that cannot be written to."""
    from nemo_rl.launch.model_files import check_model_names
    from nemo_rl.observability.console import check_writable

    checks = [functools.partial(check_model_names, config)]
    checks += [functools.partial(check_writable, key, directory) for key, directory in output_directories(config)]
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield str(error)


def _resolve(config: Any, facts: RecipeFacts) -> RecipeFacts:
    """Add what a start would find before weights load, if the models are here; then what calls of user code show."""
    from nemo_rl.config.master import RolloutRunConfig, TrainingRunConfig
    from nemo_rl.distributed.devices import has_gpu

    if isinstance(config, TrainingRunConfig) and (has_gpu() or not facts.needs_cuda):
        if all(_is_complete(model) for model in facts.models.values()) and _has_quickstart(config):
            errors, warnings = _start_problems(config)
            facts = replace(facts, run_errors=errors, run_warnings=() if errors else warnings)
        if not facts.run_errors:
            facts = replace(facts, memory_problems=tuple(_memory_problems(config)))
    if isinstance(config, RolloutRunConfig) and not facts.run_errors:
        from nemo_rl.doctor.trial import find_environment_problems

        facts = replace(facts, environment_problems=find_environment_problems(config))
    return facts


def _is_complete(model: ModelFacts) -> bool:
    return model == ModelFacts(model.name)


def _has_quickstart(config: Any) -> bool:
    """Return whether all of the quickstart's models that the recipe names are made already: that takes minutes."""
    from nemo_rl.launch.model_files import read_model_config

    names = [config.policy.model_name, *(section.model_name for section in config.teacher_sections.values())]
    return all(
        read_model_config("policy.model_name", name) is not None for name in names if name.startswith(QUICKSTART_MODEL)
    )


def _start_problems(config: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the error of resolving a run for the first device that it may have, and the warnings on the way."""
    from nemo_rl.launch.resolved_run import find_planned_layouts, resolve_on

    with _captured_warnings() as warnings:
        try:
            asyncio.run(resolve_on(config, find_planned_layouts(config)[0]))
        except NemoRLError as error:
            return (str(error),), tuple(warnings)
    return (), tuple(warnings)


@contextlib.contextmanager
def _captured_warnings() -> Iterator[list[str]]:
    """Collect the warnings of the loggers below nemo_rl, in place of showing them."""
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    own, collector = logging.getLogger("nemo_rl"), Collector(logging.WARNING)
    propagates, own.propagate = own.propagate, False
    own.addHandler(collector)
    try:
        yield found
    finally:
        own.removeHandler(collector)
        own.propagate = propagates


def _memory_problems(config: Any) -> Sequence[str]:
    """Return the parts that do not fit on the first device that the recipe may run on, if it fits on none of them."""
    from nemo_rl.launch.memory_plan import memory_plan
    from nemo_rl.launch.resolved_run import find_planned_layouts

    try:
        plans = [memory_plan(config, layout) for layout in find_planned_layouts(config)]
    except ConfigError:
        return ()  # no device: `needs_cuda`, or the engine's own check
    return plans[0].problems if all(plan.problems for plan in plans) else ()


def _closed_servers(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the addresses of served models and scorers to which no connection can be made."""
    named = {f"scorers.{name}.base_urls": scorer.get("base_urls") for name, scorer in values.get("scorers", {}).items()}
    address = (values.get("server") or {}).get("address")
    named["server.address"] = [address] if isinstance(address, str) else address
    for key, addresses in named.items():
        for each in addresses or ():
            if not _server_answers(each):
                yield key, each


def _hub_answers() -> bool:
    """Return whether the Hugging Face hub can be reached; True behind a proxy, which is not asked."""
    if any(map(os.environ.get, PROXIES)):
        return True
    return _server_answers(os.environ.get("HF_ENDPOINT", HUB))


def _server_answers(url: str) -> bool:
    parts = urlsplit(url)
    return accepts_connections(parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))


def accepts_connections(host: str, port: int) -> bool:
    """Return whether a TCP connection to a port can be made in time."""
    try:
        socket.create_connection((host, port), timeout=TIMEOUT_S).close()
    except OSError:
        return False
    return True


def probe_model(name: str, template: str | None) -> ModelFacts:
    """Look at a model's files: a directory, a checkpoint of a run, or a name in the hub's cache."""
    directory = checkpoint_weights(name) or Path(name)
    if not directory.is_dir():
        cached = find_hf_home() / "hub"
        snapshots = sorted((cached / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/config.json"))
        if not snapshots:
            return ModelFacts(name, needs_download=True)
        directory = snapshots[-1].parent
    missing = [] if (directory / MODEL_FILE).is_file() else [MODEL_FILE]
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        shards = (_read_json(index) or {}).get("weight_map")
        names = sorted({str(shard) for shard in shards.values()}) if isinstance(shards, dict) else [index.name]
        missing += [name for name in names if name == index.name or not (directory / name).is_file()]
    elif not any(directory.glob("*.safetensors")) and not any(directory.glob("*.bin")):
        missing.append("model.safetensors")
    damaged = tuple(file.name for file in sorted(directory.glob("*.safetensors")) if not _is_whole(file))
    tokenizer = directory / "tokenizer_config.json"
    settings = _read_json(tokenizer)
    if settings is None:
        return ModelFacts(name, (*missing, tokenizer.name), damaged)
    has_template = template or (directory / "chat_template.jinja").is_file()
    has_template = has_template or settings.get("chat_template")
    return ModelFacts(name, tuple(missing), damaged, lacks_template=not has_template)


def _is_whole(path: Path) -> bool:
    """Return whether a file of safetensors has the size that its header says."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        return path.stat().st_size == 8 + length + max(ends, default=0)
    except (OSError, ValueError, TypeError, KeyError, IndexError, struct.error, OverflowError, MemoryError):
        return False


def find_hf_home() -> Path:
    """Return the directory of the Hugging Face cache."""
    return Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return the mapping in a file; None if it is missing, cut off or no mapping."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def probe_rows(path: Path) -> str | None:
    """Return the problem in the first rows of a file of JSON Lines; None if they are valid."""
    try:
        num_rows = sum(1 for _ in islice(read_jsonl(path), MAX_ROWS))
    except DataError as error:
        problem = str(error).removeprefix(f"{path}:")
        return problem.strip() if problem.startswith(" ") else f"line {problem}"
    return None if num_rows else "is empty"


def _models(values: Mapping[str, Any]) -> Iterator[tuple[str, ModelFacts]]:
    teachers = {f"teachers.{name}": section for name, section in (values.get("teachers") or {}).items()}
    for key, section in {"policy": values["policy"], "teacher": values.get("teacher"), **teachers}.items():
        name = (section or {}).get("model_name")
        if name and not name.startswith(QUICKSTART_MODEL):
            yield f"{key}.model_name", probe_model(name, (section.get("tokenizer") or {}).get("chat_template"))


def _data_problems(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    default = (data.get("default") or {}).get("dataset_name")
    for name in ("train", "validation", "input"):
        sections = data.get(name) or []
        for section in sections if isinstance(sections, list) else [sections]:
            path = section.get("data_path")
            kind = section.get("dataset_name") or default or infer_dataset_name(path)
            if kind == "jsonl" and path and (problem := probe_rows(Path(path))):
                yield path, problem


def _gym_problems(env: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, section in env.items():
        python = section.get("python") if section.get("type") == "nemo_gym" else None
        if python and (problem := probe_gym_python(Path(python))):
            yield f"env.{name}.python", problem


def probe_gym_python(python: Path) -> str | None:
    """Return why an interpreter cannot run NeMo Gym; None: it can."""
    code = "import sys, importlib.util as u; print(sys.version_info >= (3, 12), u.find_spec('nemo_gym') is not None)"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{python} cannot be run: {type(error).__name__}"
    is_new, has_gym = done.stdout.split()
    if is_new == "False":
        return f"{python} is older than Python 3.12"
    return None if has_gym == "True" else f"{python} has no nemo-gym"
