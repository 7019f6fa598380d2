"""Refits that bring an adapter alone: when a run has them, and policy and engines as a transport then sees them.

Loads no torch.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

from nemo_rl.config.layout import Layout
from nemo_rl.config.master import TrainingRunConfig
from nemo_rl.config.moe import adapters_problem
from nemo_rl.errors import ConfigError
from nemo_rl.interfaces import Generation, HoldsAdapters, Policy
from nemo_rl.weight_sync.transports import engine_names, engine_replicas

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from nemo_rl.interfaces import WeightUse
    from nemo_rl.weight_manifests import Weights

ResultT = TypeVar("ResultT")
Chosen = Literal["merged", "separate"]

KEY = "weight_sync.adapter"
DESCRIPTIONS = {"merged": "merged into whole weights", "separate": "alone"}
MAX_RANK = 512  # vLLM 0.32 takes no more
TESTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")  # by `auto`: tests compare their log-probs under adapters with peft's


def choose_adapter_refit(
    config: TrainingRunConfig, layout: Layout, model: "PreTrainedConfig | None" = None
) -> tuple[Chosen, str]:
    """Return how a LoRA policy reaches the engines, and why; raises ConfigError for what does not work.

    auto: separate if rollouts run while the policy trains, for these then end under their own weights and no refit
    waits for them; else merged, since an engine computes with adapters more slowly. Times are not measured for it: the
    two round differently, so that a run would not be repeatable. Without `model` it is taken to be one that works.
    """
    wanted = config.weight_sync.adapter
    problem = _find_problem(config, layout, model)
    if wanted == "separate":
        if problem is not None:
            raise ConfigError(KEY, wanted, f"{problem}; allowed: auto, merged")
        return "separate", f"{KEY} is separate"
    if wanted == "merged":
        return "merged", f"{KEY} is merged"
    if problem is None and model is not None and model.model_type not in TESTED_MODEL_TYPES:
        problem = f"{KEY}: auto separates adapters of {', '.join(TESTED_MODEL_TYPES)} alone"
    if config.policy_names != ("",):
        if problem is not None:
            raise ConfigError("policies", list(config.policy_names), f"{problem}; allowed: {{}}")
        return "separate", "the engine samples several policies"
    if problem is not None:
        return "merged", problem
    if num_live_versions(config) == 1:
        return "merged", "no rollout runs while the policy trains"
    return "separate", "rollouts run while the policy trains"


def num_live_versions(config: TrainingRunConfig) -> int:
    """Return the number of weight versions that rollouts of a run may need at once."""
    background = config.algorithm.background
    return 1 + background.max_trajectory_age_steps if background.enabled else 1


def _find_problem(config: TrainingRunConfig, layout: Layout, model: "PreTrainedConfig | None") -> str | None:
    """Return why an adapter cannot be refitted alone; None if it can."""
    generation, policy = config.policy.generation, config.policy
    key, dim = f"policy.{policy.backend_key}.{policy.parallelism.ADAPTER_KEY}", policy.parallelism.adapter_dim
    if dim is None:
        return f"no adapter is trained ({key}.enabled)" if policy.parallelism.ADAPTER_KEY else "no adapter is trained"
    if not generation.holds_adapters:
        return f"the {generation.backend} engine holds whole weights, in one version"
    if dim > MAX_RANK:
        return f"{key}.dim is {dim}, and vLLM's adapters have at most {MAX_RANK}"
    shares_device = layout.device == "cuda" and not layout.is_split
    if shares_device and generation.can_sleep and config.policy.offload != "never":
        return (
            "the engine discards its base model while the policy has the device "
            "(policy.generation.vllm_cfg.enable_sleep_mode, policy.offload)"
        )
    return None if model is None else adapters_problem(model)


class AdapterSource:
    """A policy whose weights are its adapter."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    async def run_with_weights(self, use: "WeightUse[ResultT]") -> ResultT:
        return await self._policy.run_with_weights(use, adapter_only=True)

    async def run_on_all_ranks(self, use: "WeightUse[ResultT]") -> Sequence[ResultT]:
        return await self._policy.run_on_all_ranks(use, adapter_only=True)


class AdapterTarget:
    """Engines to which weights are a further version of an adapter."""

    def __init__(self, generation: HoldsAdapters) -> None:
        self._generation = generation

    @property
    def replicas(self) -> Sequence[Generation]:
        return engine_replicas(self._generation)

    @property
    def replica_names(self) -> Sequence[str]:
        return engine_names(self._generation)

    async def update_weights(self, manifest: "Weights", weight_version: int) -> None:
        await self._generation.load_adapter(manifest, weight_version)
