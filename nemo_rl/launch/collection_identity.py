"""The identity of a collection, kept beside its rollouts: every setting that decides samples and rewards, no other."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_rl.collect.shards import OverlongInput, TasksSummary
from nemo_rl.config.collect import SampledRunConfig
from nemo_rl.config.kinds import Section
from nemo_rl.config.recipe_files import unresolve
from nemo_rl.launch.model_files import adapter_directory

# Speed, location and patience: these may differ from one start to the next.
NON_IDENTITY_KEYS = frozenset(
    {
        "api_key_env",
        "base_urls",
        "batching",
        "device",
        "head_url",
        "return_sampling_mask",
        "in_actor",
        "in_tasks",
        "limits",
        "max_concurrency",
        "max_retries",
        "micro_batch_size",
        "num_replicas",
        "num_workers",
        "packing",
        "port_range_high",
        "port_range_low",
        "python",
        "remote",
        "retry_backoff_s",
        "start_timeout_s",
        "timeout_s",
        "verify_timeout_s",
    }
)
NUM_BLOCKS, BLOCK_BYTES = 64, 1 << 14  # blocks of a weight file that are read for its digest


def run_identity(
    config: SampledRunConfig,
    tasks: TasksSummary,
    model_path: str,
    *,
    engine: str,
    served_model: str | None,
    overlong: OverlongInput | None = None,
) -> dict[str, Any]:
    """Return the identity for `RolloutStore.open`: the same for all seeds and chunks.

    `engine`: vllm, hf, completions or chat. `served_model`: as the server calls it, also if `server.model` leaves it
    to the server; None: an engine is started.
    """
    policy, collection = config.policy, config.collection
    identity: dict[str, Any] = {
        # alike: tasks can be compared one by one
        "data": {"digest": tasks.digest, **({"overlong": asdict(overlong)} if overlong else {})},
        "config": {
            "agent_names": [one.agent_name or config.data.default.agent_name for _, one in config.data.datasets],
            "env": {name: _identity_values(section) for name, section in config.env.items()},
            "scorers": {name: _identity_values(section) for name, section in config.scorers.items()},
            "gateway": {name: getattr(config.gateway, name) for name in ("tool_parser", "reasoning_parser")},
            "generation": _identity_values(policy.generation),
            "tokenizer": policy.tokenizer.model_dump(mode="json"),
            "max_total_sequence_length": policy.max_total_sequence_length,
            "max_rollout_turns": collection.max_rollout_turns,
            "trajectory_selection": config.rollout.trajectory_selection,
            "write_token_ids": collection.write_token_ids,
            **({"write_token_columns": True} if collection.write_token_columns else {}),
        },
        "model": {
            "name": policy.model_name,
            "digest": model_digest(Path(model_path)),
            "engine": engine,
            **_engine_identity(config, served_model),
        },
    }
    return unresolve(identity, {})  # the file beside the rollouts shows nothing of the environment


def _engine_identity(config: SampledRunConfig, served_model: str | None) -> dict[str, Any]:
    if served_model is not None:
        return {"served_model": served_model}
    identity: dict[str, Any] = {"precision": config.policy.precision, "vllm_kwargs": config.server.vllm_kwargs}
    if config.server.adapters:
        named = config.server.adapters.items()
        identity["adapters"] = {name: model_digest(adapter_directory(directory)) for name, directory in named}
        identity["adapter"] = config.server.model
    return identity


def _identity_values(section: Section) -> dict[str, Any]:
    values: Mapping[str, Any] = section.model_dump(mode="json")
    return {name: value for name, value in values.items() if name not in NON_IDENTITY_KEYS}


def model_digest(directory: Path) -> str | None:
    """Return a digest of the names, sizes and sampled blocks of a model's files; None for a name on a hub.

    Two checkpoints of one run differ in every block; whole files would take minutes to read.
    """
    if not directory.is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix not in (".safetensors", ".bin", ".json", ".gguf") or not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}\n{size}\n".encode())
        with path.open("rb") as file:
            for start in sorted({size * block // NUM_BLOCKS for block in range(NUM_BLOCKS)}):
                digest.update(os.pread(file.fileno(), BLOCK_BYTES, start))
    return digest.hexdigest()
