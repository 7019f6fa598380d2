"""`nemo-rl serve`: the model of a run, or its base and all adapters, behind vLLM's own OpenAI-compatible server."""

import argparse
import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl.checkpoint import MANIFEST_FILE, verify_checkpoint
from nemo_rl.command_line import Command, ExitCode
from nemo_rl.config.moe import adapters_problem
from nemo_rl.distributed.devices import resolve_device
from nemo_rl.errors import ConfigError
from nemo_rl.generation.engines import AdapterSlots
from nemo_rl.generation.vllm.adapters import adapter_arguments
from nemo_rl.generation.vllm.cpu.settings import KV_CACHE_BYTES
from nemo_rl.launch.trained_model import TrainedModel, add_model_arguments, chosen_model
from nemo_rl.weight_sync.adapters import MAX_RANK

HIGHEST_PORT = 65_535
MAX_RUNNING_ADAPTERS = 8  # adapters in one step of the engine; others wait
MIDDLEWARE = "nemo_rl.generation.vllm.model_names.ModelNames"
# On a CPU vLLM would compile for minutes and take half of the memory, and a prompt computed in parts kills its engine.
CPU_OPTIONS = (
    *("--enforce-eager", "--no-enable-chunked-prefill"),
    *("--kv-cache-memory-bytes", str(KV_CACHE_BYTES)),
)


def served_adapters(trained: TrainedModel, *, is_whole_run: bool) -> dict[str, Path]:
    """Return the adapters to serve beside their base model, by name: all of the run, or the checkpoint's.

    None of a run that trained all weights. Raises ConfigError for adapters that vLLM cannot serve alone, and
    CheckpointError for damaged ones.
    """
    from nemo_rl.policy.hf_model import load_config  # loads torch

    if not trained.own_adapters:
        return {}
    model = load_config(_base_path(trained), _overrides(trained))
    if problem := adapters_problem(model):
        raise ConfigError("RUN", str(trained.checkpoint.path), f"{problem}; allowed: --merged")
    found = trained.adapters if is_whole_run else trained.own_adapters
    for name, directory in found.items():
        verify_checkpoint(next(parent for parent in directory.parents if (parent / MANIFEST_FILE).is_file()))
        if (rank := _rank(directory)) > MAX_RANK:
            problem = f"{name} has rank {rank}, and vLLM's adapters at most {MAX_RANK}; allowed: --merged"
            raise ConfigError("RUN", str(directory), problem)
    return found


def server_command(
    trained: TrainedModel,
    *,
    host: str,
    port: int,
    options: Sequence[str] = (),
    adapters: Mapping[str, Path] | None = None,
) -> list[str]:
    """Return the command line of vLLM's server; `options` are further words for it, which win over ours.

    With `adapters` it serves these by their names, and the base model by its own. None: the checkpoint's whole weights,
    or its adapter if that is all it has. Raises ConfigError without vLLM, and for a device that this machine lacks.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("nemo-rl serve", "vllm", "is not installed: uv sync in a clone, or the extra cpu or cuda")
    if adapters is None and not trained.has_weights:
        adapters = served_adapters(trained, is_whole_run=False)
    max_length = trained.policy.get("max_total_sequence_length", "auto")
    words = {
        **(_adapter_words(trained, adapters) if adapters else {"--model": trained.weights}),
        "--served-model-name": base_name(trained) if adapters else trained.name,
        "--middleware": MIDDLEWARE,
        "--host": host,
        "--port": port,
        "--max-model-len": max_length,
        "--dtype": trained.policy.get("precision", "auto"),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += [str(word) for option in words.items() for word in option]
    if adapters:
        command += ["--enable-lora", "--lora-modules", *(_lora_module(*each) for each in adapters.items())]
    return [*command, *(CPU_OPTIONS if _device_type(trained) == "cpu" else ()), *options]


def base_name(trained: TrainedModel) -> str:
    """Return the name by which the base model is served: the recipe's; of a directory its last part."""
    name = str(trained.policy.get("model_name"))
    return Path(name).resolve().name if Path(name).is_dir() else name


def _adapter_words(trained: TrainedModel, adapters: Mapping[str, Path]) -> dict[str, Any]:
    """Return the options of a base model with room for the adapters, in the checkpoint's tokenizer."""
    slots = AdapterSlots(max(map(_rank, adapters.values())), min(len(adapters), MAX_RUNNING_ADAPTERS))
    room = adapter_arguments(slots)
    tokenizer, overrides = trained.checkpoint.path / "policy" / "tokenizer", _overrides(trained)
    return {
        "--model": _base_path(trained),
        "--max-lora-rank": room["max_lora_rank"],
        "--max-loras": room["max_loras"],
        "--max-cpu-loras": len(adapters),
        **({"--tokenizer": tokenizer} if tokenizer.is_dir() else {}),
        **({"--hf-overrides": json.dumps(overrides)} if overrides else {}),
    }


def _base_path(trained: TrainedModel) -> str:
    from nemo_rl.launch.models import resolve_model  # loads torch

    return asyncio.run(resolve_model(str(trained.policy.get("model_name"))))


def _rank(adapter: Path) -> int:
    from nemo_rl.policy.adapter_files import describe_adapter  # loads torch

    return describe_adapter(adapter).rank


def _lora_module(name: str, directory: Path) -> str:
    return json.dumps({"name": name, "path": str(directory.resolve())})


def _overrides(trained: TrainedModel) -> dict[str, Any]:
    found = trained.policy.get("hf_config_overrides")
    return dict(found) if isinstance(found, Mapping) else {}


def server_environment(trained: TrainedModel) -> dict[str, str]:
    """Return the variables of the server's process; `VLLM_LOGGING_LEVEL` is as the user has set it."""
    from nemo_rl.generation.vllm.process_environment import environment  # loads torch

    level = {"VLLM_LOGGING_LEVEL": "INFO"}
    return {**environment(_device_type(trained)), **level, **os.environ}


def _device_type(trained: TrainedModel) -> str:
    """Return "cuda" or "cpu"; raises ConfigError for a `policy.device` that this machine lacks."""
    wanted = trained.policy.get("device", "auto")
    return resolve_device(wanted if wanted in ("auto", "cpu", "cuda") else "auto").type


def check_port(port: int) -> int:
    """Return the port; raises ConfigError for one that does not exist."""
    if not 0 < port <= HIGHEST_PORT:
        raise ConfigError("--port", port, f"allowed: 1 to {HIGHEST_PORT}")
    return port


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="an address of this machine; default: 127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000")
    parser.add_argument(
        "--merged",
        action="store_true",
        help="LoRA: one checkpoint's merged weights; default: base and adapters by name",
    )


def _serve(parsed: argparse.Namespace) -> ExitCode:
    trained = chosen_model(parsed)
    port = check_port(parsed.port)
    is_whole_run = parsed.step is None and trained.checkpoint.path != parsed.run
    adapters = {} if parsed.merged else served_adapters(trained, is_whole_run=is_whole_run)
    command = server_command(trained, host=parsed.host, port=port, options=parsed.command, adapters=adapters)
    environment = server_environment(trained)
    names = [base_name(trained), *adapters] if adapters else [trained.name]
    sys.stdout.write(f"Model       {trained.checkpoint.path}\nAs          {', '.join(names)}\n")
    sys.stdout.write(f"At          http://{parsed.host}:{port}/v1\n")
    sys.stdout.flush()
    os.execve(command[0], command, environment)


SERVE = Command(
    """Serve the model of a run by vLLM's OpenAI-compatible server. Words after -- are options of `vllm serve`.

A run with LoRA is served as its base model and the adapters of its checkpoints; a request's `model` names one.
""",
    _add_arguments,
    _serve,
    program="nemo-rl serve",
    reported_errors=(OSError,),
    takes_command=True,
)
