"""Advice for errors that come from a lack of device memory: the keys that would help."""

from collections.abc import Iterator
from contextlib import contextmanager

from nemo_rl.config.master import TrainingRunConfig
from nemo_rl.config.supervised_runs import SupervisedRunConfig

ENGINE = "policy.generation.vllm_cfg"
NO_ROOM_FOR_CACHE = ("No available memory for the cache blocks", "larger than the available KV cache")
DEVICE_TAKEN = ("Free memory on device",)  # vLLM's, before it loads
ENGINE_FAILED = ("Engine core initialization failed",)  # vLLM's, whose log has the cause
ALLOCATION_FAILED = ("OutOfMemoryError", "out of memory")  # torch's, and CUDA's own


@contextmanager
def advise_on_memory(config: TrainingRunConfig | SupervisedRunConfig) -> Iterator[None]:
    """Add a note with the keys that would help to an error of a lack of memory; every error is raised again."""
    try:
        yield
    except Exception as error:
        if (advice := find_advice(error, config)) is not None:
            error.add_note(advice)
        raise


def find_advice(error: BaseException, config: TrainingRunConfig | SupervisedRunConfig) -> str | None:
    """Return which keys would help against an error; None if it has another cause."""
    text = _chain_text(error)

    def names(patterns: tuple[str, ...]) -> bool:
        return any(pattern in text for pattern in patterns)

    share = ""
    if isinstance(config, TrainingRunConfig):
        share = getattr(getattr(config.policy.generation, "vllm_cfg", None), "gpu_memory_utilization", "")
    more = f"raise {ENGINE}.gpu_memory_utilization ({share}) or {ENGINE}.tensor_parallel_size"
    less = f"lower {ENGINE}.gpu_memory_utilization ({share}){_offload_of_weights(config, ', or set ')}"
    if names(NO_ROOM_FOR_CACHE):
        return f"The engine's share of the device is too small: {more}; --dry-run shows the plan."
    if names(DEVICE_TAKEN):
        return f"The policy or another process holds too much of the device: {less}; --dry-run shows the plan."
    if names(ENGINE_FAILED):
        return f"If its log names memory: for more KV cache {more}; for a device that is full {less}."
    return _training_advice(config) if names(ALLOCATION_FAILED) else None


def _training_advice(config: TrainingRunConfig | SupervisedRunConfig) -> str:
    policy = config.policy
    budget = next((n for n in ("sequence_packing", "dynamic_batching") if getattr(policy, n).enabled), None)
    size, key = policy.train_micro_batch_size, "policy.train_micro_batch_size"
    if budget is not None:
        size, key = getattr(policy, budget).train_mb_tokens, f"policy.{budget}.train_mb_tokens"
    is_shared = isinstance(config, TrainingRunConfig) and config.policy.generation.colocated.enabled
    helps = [
        "policy.offload=always" if is_shared and policy.offload != "always" else "",
        f"a smaller {key} ({size})",
        f"policy.{policy.backend_key}.activation_checkpointing=true",
        _offload_of_weights(config),
        f"more GPUs, which share long samples by policy.{policy.backend_key}.context_parallel_size",
    ]
    listed = ", ".join(filter(None, helps))
    return f"The device has too little memory; what helps, the cheapest first: {listed}; --dry-run shows the plan."


def _offload_of_weights(config: TrainingRunConfig | SupervisedRunConfig, prefix: str = "") -> str:
    """Return the override that keeps the policy's weights on the host; "" if its backend has none, or it is on."""
    has_it = getattr(config.policy.parallelism, "cpu_offload", None) is False
    return f"{prefix}policy.{config.policy.backend_key}.cpu_offload=true" if has_it else ""


def _chain_text(error: BaseException) -> str:
    """Return the types and texts of an error and of those that led to it."""
    found: list[str] = []
    link: BaseException | None = error
    while link is not None and len(found) < 20:
        found.append(f"{type(link).__name__}: {link}")
        link = link.__cause__ or link.__context__
    return "\n".join(found)
