"""The keys that the planner varies, as a run's configuration has them, and the schedules that their values ask for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from nemo_rl.errors import ConfigError
from nemo_rl.trace.plan import Schedule
from nemo_rl.trace.run_config import DEFAULT_MAX_NUM_SEQS, Config, algorithm_key, background_key, lookup
from nemo_rl.trace.workload import ENVIRONMENT, SCORER, Limits

MAX_VALUE = 1_000_000
COLOCATED = "policy.generation.colocated.enabled"
ENGINE_GPUS = "policy.generation.colocated.resources.gpus_per_node"

Values: TypeAlias = Mapping[str, int | bool]  # values by key


@dataclass(frozen=True, slots=True)
class PlannerKeys:
    """The keys that the planner knows, for a run's configuration."""

    config: Config

    @property
    def algorithm(self) -> str:
        return algorithm_key(self.config)

    @property
    def background(self) -> str:
        return background_key(self.config)

    @property
    def calls(self) -> dict[str, tuple[str, int]]:
        """Return keys that limit calls, with the name of the wait and the rollouts of one call."""
        found = {}
        for section, prefix in (("env", ENVIRONMENT), ("scorers", SCORER)):
            for name, entry in (lookup(self.config, section) or {}).items():
                if not isinstance(entry, Mapping):
                    continue
                is_batched = bool(lookup(entry, "batching.enabled"))
                size = int(lookup(entry, "batching.max_batch_size")) if is_batched else 1
                keys = ["batching.max_calls"] if is_batched else []
                for key in (*keys, "limits.max_concurrency", "num_replicas"):
                    if isinstance(lookup(entry, key), int):
                        found[f"{section}.{name}.{key}"] = prefix + name, size
        return found

    @property
    def limits(self) -> Limits:
        """Return the values of the run that its spans do not tell."""
        schedule = self.schedule(self.present)
        return Limits(
            schedule.num_prompts * schedule.num_generations,
            schedule.max_num_seqs,
            schedule.num_engines,
            schedule.calls,
            shares_devices=lookup(self.config, COLOCATED) is not False,
        )

    @property
    def present(self) -> dict[str, int | bool]:
        """Return all keys with the run's values."""
        values: dict[str, Any] = {
            f"{self.algorithm}.num_prompts_per_step": self._get(f"{self.algorithm}.num_prompts_per_step"),
            f"{self.algorithm}.num_generations_per_prompt": self._get(f"{self.algorithm}.num_generations_per_prompt"),
            f"{self.background}.enabled": bool(lookup(self.config, f"{self.background}.enabled")),
            f"{self.background}.max_trajectory_age_steps": self._get(f"{self.background}.max_trajectory_age_steps"),
            "policy.generation.num_replicas": self._get("policy.generation.num_replicas"),
            "policy.generation.vllm_cfg.max_num_seqs": self._get(
                "policy.generation.vllm_cfg.max_num_seqs", DEFAULT_MAX_NUM_SEQS
            ),
            "policy.train_micro_batch_size": self._get("policy.train_micro_batch_size"),
        }
        split = {ENGINE_GPUS: self._get(ENGINE_GPUS)} if self.is_split else {}
        return values | split | {key: self._get(key) for key in self.calls}

    @property
    def is_split(self) -> bool:
        """Return whether engines have GPUs of their own on each node, whose number a sweep may vary."""
        return lookup(self.config, COLOCATED) is False and isinstance(lookup(self.config, ENGINE_GPUS), int)

    @property
    def gpus_per_engine(self) -> int:
        return self._get("policy.generation.vllm_cfg.tensor_parallel_size")

    @property
    def num_train_devices(self) -> int:
        return self._devices(self.present)[0]

    def _devices(self, values: Values) -> tuple[int, int]:
        """Return the devices that train and those that sample; of a shared pool all do both."""
        nodes, gpus = self._get("cluster.num_nodes"), self._get("cluster.gpus_per_node")
        if not self.is_split:
            return nodes * gpus, 0
        engines = values[ENGINE_GPUS]
        if not 0 < engines < gpus:
            raise ConfigError(ENGINE_GPUS, engines, f"of {gpus} GPUs per node; allowed: 1 to {gpus - 1}")
        return nodes * (gpus - engines), nodes * engines

    def _get(self, key: str, otherwise: int = 1) -> int:
        value = lookup(self.config, key)
        return value if isinstance(value, int) else otherwise

    def schedule(self, values: Values) -> Schedule:
        """Return the schedule that the values of keys describe."""
        micro_batch = "policy.train_micro_batch_size"
        calls: dict[str, int] = {}
        for key, (wait, size) in self.calls.items():
            calls[wait] = min(values[key] * size, calls.get(wait, MAX_VALUE))
        train, sample = self._devices(values)
        num_engines = values["policy.generation.num_replicas"]
        if self.is_split and ENGINE_GPUS in values and values[ENGINE_GPUS] != self._get(ENGINE_GPUS):
            num_engines = max(sample // self.gpus_per_engine, 1)
        return Schedule(
            num_prompts=values[f"{self.algorithm}.num_prompts_per_step"],
            num_generations=values[f"{self.algorithm}.num_generations_per_prompt"],
            age=values[f"{self.background}.max_trajectory_age_steps"] if values[f"{self.background}.enabled"] else None,
            num_engines=num_engines,
            max_num_seqs=values["policy.generation.vllm_cfg.max_num_seqs"],
            calls=calls,
            micro_batch_scale=values[micro_batch] / self.present[micro_batch],
            trainer_scale=train / self._devices(self.present)[0],
            num_devices=train + sample,
        )
