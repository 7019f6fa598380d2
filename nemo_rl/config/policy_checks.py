"""Checks of the table `policies`: whatever several policies cannot be combined with is refused by name."""

import re
from collections.abc import Callable

from nemo_rl.config.kinds import Section
from nemo_rl.config.master import GRPORunConfig, RolloutRunConfig
from nemo_rl.errors import ConfigError

NAME = re.compile("[a-z][a-z0-9_]{0,31}")  # part of metrics' names and of paths
KEY = "policies"


def check_policies(config: GRPORunConfig) -> None:
    """Raise ConfigError for a table `policies` that cannot run, and for environments that name other policies."""
    if not config.policies:
        return
    for name in config.policies:
        if not NAME.fullmatch(name):
            problem = "a name has at most 32 lower-case letters, digits and underscores, a letter first"
            raise ConfigError(f"{KEY}.{name}", "set", problem)
    if not any(section.trainable for section in config.policies.values()):
        raise ConfigError(KEY, list(config.policies), "none of them is trained; at least one must be trainable")
    for name, section in config.policies.items():
        if not section.trainable and (section.optimizer.kwargs or section.loss_fn is not None):
            key = "optimizer" if section.optimizer.kwargs else "loss_fn"
            raise ConfigError(f"{KEY}.{name}.{key}", "set", f"{KEY}.{name}.trainable is false; allowed: neither")
        if section.trainable and section.adapter_path is not None and config.needs_reference:
            problem = "the reference of adapters is their base, from which this policy does not start"
            allowed = "null, or a run without a reference (reference_policy_kl_penalty)"
            raise ConfigError(f"{KEY}.{name}.adapter_path", section.adapter_path, f"{problem}; allowed: {allowed}")
    for check in (_check_adapters, _check_engine, _check_algorithm, _check_rollouts):
        check(config)


def check_speakers(config: RolloutRunConfig) -> None:
    """Raise ConfigError for an environment that names policies which the run does not have or it cannot use."""
    table, known = config.policy_table
    for name, section in config.env.items():
        if section.policies and not known:
            problem = f"the run has no table `{table}`; allowed: []"
            raise ConfigError(f"env.{name}.policies", section.policies, problem)
        for policy in section.policies:
            if policy not in known:
                raise ConfigError(f"env.{name}.policies", policy, f"is not in `{table}`", known=list(known))
        if len(set(section.policies)) < len(section.policies):
            raise ConfigError(f"env.{name}.policies", section.policies, "names a policy twice")
        if section.policies and name in config.runner_sections:
            problem = "an agent names the models that it calls; allowed: []"
            raise ConfigError(f"env.{name}.policies", section.policies, problem)
        if section.scorers and len(section.policies) > 1:
            problem = f"score a rollout of one policy, and env.{name}.policies has several; allowed: []"
            raise ConfigError(f"env.{name}.scorers", section.scorers, problem)


def check_losses(config: GRPORunConfig, check_entry: Callable[[str, Section], None]) -> None:
    """Check the loss of each policy as that of the run."""
    for name, section in config.policies.items():
        if section.loss_fn is not None:
            check_entry(f"{KEY}.{name}.loss_fn", section.loss_fn)


def _check_adapters(config: GRPORunConfig) -> None:
    chosen, key = config.policy.parallelism, f"policy.{config.policy.backend_key}"
    if not chosen.HOLDS_POLICIES:
        backend = chosen.title or config.policy.backend
        raise ConfigError(KEY, list(config.policies), f"{backend} trains a single policy; allowed: {{}}, or FSDP2")
    section = chosen.adapter_section
    if section is None:
        problem = f"required by `{KEY}`, which are adapters on one base; allowed: true"
        raise ConfigError(f"{key}.{chosen.ADAPTER_KEY}.enabled", False, problem)
    if section.save_merged:
        problem = f"checkpoints of several policies hold their adapters alone (`{KEY}`); allowed: false"
        raise ConfigError(f"{key}.{chosen.ADAPTER_KEY}.save_merged", True, problem)


def _check_engine(config: GRPORunConfig) -> None:
    generation = config.policy.generation
    if not generation.holds_adapters:
        problem = f"holds whole weights, in one version: the adapters of `{KEY}` need backend: vllm"
        raise ConfigError("policy.generation.backend", generation.backend, problem)
    if config.weight_sync.adapter == "merged":
        problem = f"an engine holds one merged model, and `{KEY}` has several adapters; allowed: auto, separate"
        raise ConfigError("weight_sync.adapter", "merged", problem)
    if config.policy.router_replay.enabled:
        problem = f"routes are replayed in runs of one policy, and `{KEY}` has several; allowed: false"
        raise ConfigError("policy.router_replay.enabled", True, problem)
    if config.policy.sequence_packing.share_prefixes:
        problem = f"rows of several policies are not trees of one policy's prefixes (`{KEY}`); allowed: false"
        raise ConfigError("policy.sequence_packing.share_prefixes", True, problem)


def _check_algorithm(config: GRPORunConfig) -> None:
    grpo = config.grpo
    if grpo.use_dynamic_sampling:
        problem = f"a group that teaches one of `{KEY}` nothing may teach another; allowed: false"
        raise ConfigError("grpo.use_dynamic_sampling", True, problem)
    if grpo.adv_estimator.needs_greedy_baseline or grpo.adv_estimator.uses_teachers:
        reads = "teachers" if grpo.adv_estimator.uses_teachers else "a greedy rollout"
        problem = f"reads {reads} of one policy, and `{KEY}` has several; allowed: estimators without"
        raise ConfigError("grpo.adv_estimator.name", grpo.adv_estimator.name, problem)
    if config.reward_penalties.enabled:
        problem = f"penalise the reply of one policy, and `{KEY}` has several; allowed: none of them"
        raise ConfigError("reward_penalties", list(config.reward_penalties.enabled), problem)
    for key in ("invalid_tool_call_advantage", "malformed_thinking_advantage"):
        if (value := getattr(grpo, key)) is not None:
            raise ConfigError(
                f"grpo.{key}", value, f"is for replies of one policy, and `{KEY}` has several; allowed: null"
            )


def _check_rollouts(config: GRPORunConfig) -> None:
    for name in config.runner_sections:
        problem = f"agents call the gateway, which samples a single policy, and `{KEY}` has several"
        raise ConfigError(f"env.{name}", "set", f"{problem}; allowed: environments")
