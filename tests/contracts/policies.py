"""Policies on any layout of ranks, and scripts of calls that run on all of them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from nemo_rl.config.policies import NamedPolicyConfig
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.loss_types import TopK
from nemo_rl.policy.batch_transfer import merge_recorded, merge_rows
from nemo_rl.policy.hf_model import decoder_layers
from nemo_rl.policy.ranks import RankLayout
from nemo_rl.policy.truncation import WHOLE, Truncation
from nemo_rl.policy.worker import PolicyWorker, make_policy_worker

SETTINGS: dict[str, Any] = {
    "precision": "float32",
    "device": "cpu",
    "train_micro_batch_size": 3,
    "logprob_chunk_size": 4,
    "max_grad_norm": None,
    "optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-2, "betas": [0.9, 0.99], "weight_decay": 0.1}},
}
SGD = {"name": "torch.optim.SGD", "kwargs": {"lr": 1.0}}  # a step moves every weight by its gradient

SCORES = ("logprobs", "reference_logprobs", "topk_logprobs")  # each rank returns its rows
Call = tuple[Any, ...]  # a method's name and its arguments, the keywords last as a dict


def make_policy(
    layout: RankLayout,
    path: Path,
    *,
    num_samples: int = 8,
    optimizer_steps: int = 1,
    temperature: float = 1.0,
    needs_reference: bool = False,
    truncation: Truncation = WHOLE,
    tokenizer: Any = None,
    policies: dict[str, dict[str, Any]] | None = None,
    **config: Any,
) -> PolicyWorker:
    settings = {
        "model_name": str(path),
        "train_global_batch_size": num_samples // optimizer_steps,
        **SETTINGS,
        **config,
    }
    section = PolicyConfig.model_validate(settings)
    return make_policy_worker(
        section,
        layout=layout,
        model_path=str(path),
        temperature=temperature,
        needs_reference=needs_reference,
        num_samples_per_step=num_samples,
        seed=0,
        tokenizer=tokenizer,
        truncation=truncation,
        policies={name: NamedPolicyConfig.model_validate(values) for name, values in (policies or {}).items()},
    )


def play(layout: RankLayout, *, path: Path, calls: Sequence[Call], config: dict[str, Any]) -> list[Any]:
    """Return the result of each call of a policy made for them, on one rank."""
    policy = make_policy(layout, path, **config)
    try:
        return [_called(policy, *call) for call in calls]
    finally:
        policy.close()


def _called(policy: PolicyWorker, name: str, *arguments: Any) -> Any:
    if name == "types_of_stepped_weights":
        return {parameter.dtype for group in policy._optimizer.param_groups for parameter in group["params"]}
    if name == "types_of_residual_stream":
        return _types_between_layers(policy, *arguments)
    if arguments and arguments[0] is raising:
        return _error_of(policy, raising)
    if name in SCORES:
        scored = getattr(policy, name)(*arguments)
        merged = merge_rows(policy.layout.all_gather_object(scored), arguments[0])
        return merged[0] if len(merged) == 1 else TopK(*merged)
    if name == "recorded_logprobs":
        return merge_recorded(policy.layout.all_gather_object(policy.recorded_logprobs()), *arguments)
    keywords = arguments[-1] if arguments and isinstance(arguments[-1], dict) else {}
    return getattr(policy, name)(*(arguments[:-1] if keywords else arguments), **keywords)


def _types_between_layers(policy: PolicyWorker, batch: TensorDict) -> set[torch.dtype]:
    """Return the types of what decoder layers return while a batch is scored."""
    found: set[torch.dtype] = set()
    hooks = [
        layer.register_forward_hook(lambda layer, inputs, output: found.add(output.dtype))
        for layer in decoder_layers(policy.module)
    ]
    policy.logprobs(batch)
    for hook in hooks:
        hook.remove()
    return found


def clones(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in weights}


def first_name(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Read only the first of all weights."""
    return next(iter(weights))[0]


def raising(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise at the second of all weights."""
    for index, _ in enumerate(weights):
        if index == 1:
            raise KeyError("the reader")


def _error_of(policy: PolicyWorker, use: Any) -> str | None:
    try:
        return policy.run_with_weights(use)
    except KeyError as error:
        return repr(error)
