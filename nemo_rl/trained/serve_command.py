"""`nemo-rl serve`: the model of a run behind vLLM's own OpenAI-compatible server."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence

from nemo_rl.command_line import Command, ExitCode
from nemo_rl.distributed.devices import resolve_device
from nemo_rl.errors import ConfigError
from nemo_rl.generation.vllm.cpu.settings import KV_CACHE_BYTES
from nemo_rl.launch.trained_model import TrainedModel, add_model_arguments, chosen_model

HIGHEST_PORT = 65_535
# On a CPU vLLM would compile for minutes and take half of the memory, and a prompt computed in parts kills its engine.
CPU_OPTIONS = (
    *("--enforce-eager", "--no-enable-chunked-prefill"),
    *("--kv-cache-memory-bytes", str(KV_CACHE_BYTES)),
)


def server_command(trained: TrainedModel, *, host: str, port: int, options: Sequence[str] = ()) -> list[str]:
    """Return the command line of vLLM's server; `options` are further words for it, which win over ours.

    Raises ConfigError without vLLM, and for a device that this machine lacks.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("nemo-rl serve", "vllm", "is not installed: uv sync in a clone, or the extra cpu or cuda")
    max_length = trained.policy.get("max_total_sequence_length", "auto")
    words = {
        "--model": trained.weights,
        "--served-model-name": trained.name,
        "--host": host,
        "--port": port,
        "--max-model-len": max_length,
        "--dtype": trained.policy.get("precision", "auto"),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += [str(word) for option in words.items() for word in option]
    return [*command, *(CPU_OPTIONS if _device_type(trained) == "cpu" else ()), *options]


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


def _serve(parsed: argparse.Namespace) -> ExitCode:
    trained = chosen_model(parsed)
    port = check_port(parsed.port)
    command = server_command(trained, host=parsed.host, port=port, options=parsed.command)
    environment = server_environment(trained)
    sys.stdout.write(f"Model       {trained.checkpoint.path}\nAs          {trained.name}\n")
    sys.stdout.write(f"At          http://{parsed.host}:{port}/v1\n")
    sys.stdout.flush()
    os.execve(command[0], command, environment)


SERVE = Command(
    "Serve the model of a run by vLLM's OpenAI-compatible server. Words after -- are options of `vllm serve`.",
    _add_arguments,
    _serve,
    program="nemo-rl serve",
    reported_errors=(OSError,),
    takes_command=True,
)
