"""Rules across sections that the schema cannot express. They load no model and no torch, and only check that files
exist."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeGuard

from nemo_rl.config import master
from nemo_rl.config.data import DataConfig, DatasetConfig, check_prompt_file, name_validation_sets, resolve_dataset
from nemo_rl.config.entry_checks import check_distillation, check_environments, check_grpo, check_scorers, run_checks
from nemo_rl.config.images import ImagesConfig, check_images
from nemo_rl.config.layout_planner import make_layout, make_policy_layout
from nemo_rl.config.master import TEACHERS, DistillationRunConfig, GRPORunConfig, RolloutRunConfig, TrainingRunConfig
from nemo_rl.config.policy import AUTO, PolicyConfig, SchedulerStageConfig, TeacherConfig, check_backend
from nemo_rl.config.policy_checks import check_speakers
from nemo_rl.config.registries import ENGINES, PROCESSORS
from nemo_rl.config.supervised_runs import (
    DPORunConfig,
    RewardModelRunConfig,
    SFTRunConfig,
    SupervisedConfig,
    SupervisedRunConfig,
)
from nemo_rl.errors import ConfigError, raise_config_errors, suggest_name
from nemo_rl.metric_names import ranking_metrics

METRIC_NAME_KEY = "checkpointing.metric_name"
PAIR_KEYS = ("chosen_key", "rejected_key")  # dataset keys that only preference pairs read
ROLLOUT_KEYS = ("env_name", "agent_name", "processor")  # those that only rollouts read


def check_async(config: TrainingRunConfig) -> None:
    """Raise ConfigError for GRPO that would learn from samples of older weights as if they were the policy's own.

    Distillation needs no correction: its loss compares distributions at whatever tokens were sampled.
    """
    losses = config.losses if isinstance(config, GRPORunConfig) else {"": config.loss_fn}
    for name, loss in losses.items():
        if config.algorithm.background.enabled and not loss.tolerates_stale_samples:
            own = isinstance(config, GRPORunConfig) and name and config.policies[name].loss_fn is not None
            raise ConfigError(
                f"{f'policies.{name}.' if own else ''}loss_fn.use_importance_sampling_correction",
                False,
                "grpo.async_grpo trains on samples of older weights: must be true "
                "(see truncated_importance_sampling_type)",
            )


PACKING, DYNAMIC = "sequence_packing", "dynamic_batching"


def check_batching(policy: PolicyConfig) -> None:
    """Check that at most one way of making micro-batches is configured, and that it holds every possible sample."""
    _check_section("policy", policy, policy.max_total_sequence_length)


def check_teacher_batching(config: TrainingRunConfig) -> None:
    for key, teacher in config.teacher_sections.items():
        check_backend(teacher, key=key)
        _check_section(key, teacher, config.policy.max_total_sequence_length)
        for name in (PACKING, DYNAMIC):
            section = getattr(teacher, name)
            if section.enabled and section.logprob_mb_tokens is None:
                raise ConfigError(f"{key}.{name}.logprob_mb_tokens", None, "required: the tokens of one forward pass")


def _check_section(key: str, model: PolicyConfig | TeacherConfig, longest: int) -> None:
    if model.sequence_packing.enabled and model.dynamic_batching.enabled:
        problem = f"{key}.{DYNAMIC}.enabled is true too: samples are packed or padded; allowed: one of the two"
        raise ConfigError(f"{key}.{PACKING}.enabled", True, problem)
    _check_shared_prefixes(key, model)
    if model.parallelism.divides_only_long:
        _check_divided_rows(key, model)
        longest = 1
    for section in (PACKING, DYNAMIC):
        values = getattr(model, section)
        for name in ("train_mb_tokens", "logprob_mb_tokens"):
            tokens = getattr(values, name)
            if values.enabled and tokens is not None and tokens < longest:
                problem = f"must be at least policy.max_total_sequence_length = {longest}, or null"
                raise ConfigError(f"{key}.{section}.{name}", tokens, problem)


def _check_divided_rows(key: str, model: PolicyConfig | TeacherConfig) -> None:
    """Raise ConfigError for `context_parallel_size: auto` if no limit of tokens tells which rows are long."""
    where = f"{key}.{model.backend_key}.context_parallel_size"
    if isinstance(model, TeacherConfig):
        raise ConfigError(where, AUTO, "a teacher scores whatever the policy sampled; allowed: a number")
    if not model.sequence_packing.enabled:
        problem = f"{key}.{PACKING}.enabled is false, whose train_mb_tokens tell which samples are long"
        raise ConfigError(where, AUTO, f"{problem}; allowed: a number, or both")


def _check_shared_prefixes(key: str, model: PolicyConfig | TeacherConfig) -> None:
    """Raise ConfigError for `share_prefixes` if nothing is packed, or nothing that reads it."""
    packing, section = model.sequence_packing, f"{key}.{PACKING}"
    if not packing.share_prefixes:
        return
    default = type(packing).model_fields["algorithm"].default
    if not packing.enabled:
        problem = f"{section}.enabled is false: only packed samples share prefixes; allowed: false, or both true"
    elif isinstance(model, TeacherConfig) and model.server is not None:
        problem = f"{key}.server computes its scores itself; allowed: false"
    elif not model.parallelism.SHARES_PREFIXES:
        problem = f"the backend {model.parallelism.title or model.backend} does not share prefixes; allowed: false"
    elif model.context_parallel_size > 1:
        slices = f"{key}.{model.backend_key}.context_parallel_size is {model.context_parallel_size}"
        problem = f"{slices}: trees of prefixes are not cut into slices; allowed: false"
    elif model.parallelism.splits_residual:
        slices = f"{key}.{model.backend_key}.sequence_parallel is true"
        problem = f"{slices}: trees of prefixes are not cut into slices; allowed: false"
    elif packing.algorithm != default:
        where, problem = f"{section}.algorithm", f"{section}.share_prefixes packs whole groups; allowed: {default}"
        raise ConfigError(where, packing.algorithm, problem)
    else:
        return
    raise ConfigError(f"{section}.share_prefixes", True, problem)


def _check_replayed_pass(config: TrainingRunConfig) -> None:
    """Raise ConfigError for `router_replay.mode: R2` in runs without a log-prob pass."""
    if config.policy.router_replay.records_own and not isinstance(config, GRPORunConfig):
        problem = "only GRPO has a log-prob pass whose routes could be replayed; allowed: R3, observe"
        raise ConfigError("policy.router_replay.mode", "R2", problem)


def check_router_replay(policy: PolicyConfig) -> None:
    """Raise ConfigError for `router_replay` on a backend that cannot replay."""
    backend = policy.parallelism
    if policy.router_replay.enabled and not backend.REPLAYS_ROUTES:
        problem = f"the backend {backend.title or policy.backend} does not replay routes; allowed: false"
        raise ConfigError("policy.router_replay.enabled", True, problem)


def check_checkpointing(config: TrainingRunConfig) -> None:
    """Raise ConfigError for a metric of an unknown name, or one that this run never computes.

    A name of "train:" with a slash ("train:advantages/mean") depends on the data and is checked when the first
    checkpoint is written.
    """
    section = config.algorithm_key
    extra = _pass_metrics(config)
    metric = _ranking_metric(config, config.algorithm, section, extra, "accuracy")
    if metric is None or metric.kind == "train":
        return
    name = metric.name.rpartition("/")[2]
    if name.startswith("greedy_") and not config.algorithm.val_greedy:
        raise ConfigError(METRIC_NAME_KEY, metric.text, f"needs {section}.val_greedy: true")
    if name.endswith("accuracy") and config.algorithm.val_correct_reward is None:
        problem = f"needs {section}.val_correct_reward; for the mean reward write val:reward"
        raise ConfigError(METRIC_NAME_KEY, metric.text, problem)


class RankingMetric(NamedTuple):
    """`checkpointing.metric_name`, split."""

    text: str  # as configured
    kind: str  # "val" or "train"
    name: str


def _ranking_metric(
    config: TrainingRunConfig | SupervisedRunConfig,
    validation: master.RolloutTrainingConfig | SupervisedConfig,
    section: str,
    extra: frozenset[str],
    example: str,
) -> RankingMetric | None:
    """Return the metric that ranks checkpoints, None if none does; raises ConfigError unless the run computes it.

    `extra` are names of validations that `section` adds; `example` is what the errors propose.
    """
    text = config.checkpointing.metric_name
    if not config.checkpointing.enabled or text is None:
        return None
    kind, _, name = text.partition(":")
    if kind not in ("val", "train") or not name:
        raise ConfigError(
            METRIC_NAME_KEY, text, f'must be "val:" or "train:" and a metric\'s name, e.g. "val:{example}"'
        )
    known = ranking_metrics(kind, section) | (extra if kind == "val" else frozenset())
    if "/" not in name and name not in known:
        raise ConfigError(METRIC_NAME_KEY, text, f"no such metric{suggest_name(name, known)}")
    if kind == "val" and not config.data.validates:
        return None  # the start warns of it, and keeps the newest checkpoints
    if kind == "val" and "/" in name:
        _check_set_metric(config, text, name, known)
    if kind == "val" and validation.val_period == 0 and not validation.val_at_end:
        raise ConfigError(METRIC_NAME_KEY, text, f"needs {section}.val_period above 0, or {section}.val_at_end")
    return RankingMetric(text, kind, name)


def _check_set_metric(
    config: TrainingRunConfig | SupervisedRunConfig, text: str, name: str, known: frozenset[str]
) -> None:
    """Raise ConfigError unless `name` is `<dataset>/<metric>` of one of several validation datasets."""
    dataset, _, metric = name.rpartition("/")
    sets = name_validation_sets(config.data)
    if metric not in known:
        raise ConfigError(METRIC_NAME_KEY, text, f"no such metric{suggest_name(metric, known)}")
    if len(sets) == 1:
        raise ConfigError(METRIC_NAME_KEY, text, f'{sets[0]} is the only validation dataset: write "val:{metric}"')
    if dataset not in sets:
        raise ConfigError(
            METRIC_NAME_KEY, text, f"no such validation dataset; those of data.validation: {', '.join(sets)}"
        )


def _pass_metrics(config: TrainingRunConfig) -> frozenset[str]:
    k = config.algorithm.val_num_generations_per_prompt
    return frozenset({f"pass_{k}"} if k > 1 else ())


def uses_teachers(config: TrainingRunConfig) -> bool:
    """Return whether any part of the algorithm queries a teacher."""
    if isinstance(config, GRPORunConfig):
        return config.grpo.adv_estimator.uses_teachers
    return isinstance(config, DistillationRunConfig)


def uses_cross_tokenizer(config: TrainingRunConfig) -> TypeGuard[DistillationRunConfig]:
    """Return whether teachers are queried in tokens of their own tokenizer."""
    return isinstance(config, DistillationRunConfig) and config.loss_fn.token_matching is not None


def check_teachers(config: TrainingRunConfig) -> None:
    """Raise ConfigError for a teacher that is never used, a task that does not exist, and a missing teacher."""
    if not uses_teachers(config):
        for key in config.teacher_sections:
            reason = "teachers are read by grpo.adv_estimator.name: opd and by examples/run_distillation.py only"
            raise ConfigError(key, "set", f"{reason}; allowed: null")
        return
    if not config.teacher_sections:
        raise ConfigError("teacher", None, "required: a model to learn from (or teachers.<task>, by task name)")
    for task in config.teachers:
        if task not in config.env:
            known = ", ".join(sorted(config.env)) or "none"
            raise ConfigError(f"{TEACHERS}.{task}", "set", f"no such task; those of env: {known}", known=config.env)
    for key, section in config.teacher_sections.items():
        temperature = config.policy.generation.temperature
        if section.server is not None and temperature != 1:
            raise ConfigError(
                f"{key}.server",
                section.server.model,
                f"a server answers for temperature 1, and policy.generation.temperature is {temperature:g}",
            )


def check_task_teachers(config: TrainingRunConfig, task_names: frozenset[str]) -> None:
    """Raise ConfigError for a task of the training data without a teacher."""
    for task in sorted(task_names):
        if config.teacher_key(task) is None:
            raise ConfigError(
                f"{TEACHERS}.{task}", None, "the training data has this task: set it, or teacher for all tasks"
            )


def check(config: TrainingRunConfig) -> None:
    """Raise ConfigError for the combinations that cannot run, all at once."""
    checks: list[Callable[[Any], None]] = [*_ROLLOUT_CHECKS, *_TRAINING_CHECKS]
    if isinstance(config, GRPORunConfig):
        checks.append(check_grpo)
    if isinstance(config, DistillationRunConfig):
        checks.append(check_distillation)
    run_checks(checks, config)


def check_rollouts(config: RolloutRunConfig) -> None:
    """Raise ConfigError for the problems of what rollouts alone need."""
    run_checks(_ROLLOUT_CHECKS, config)


def _check_batches(config: TrainingRunConfig) -> None:
    key, samples = config.algorithm_key, config.algorithm.num_samples_per_step
    batch = config.policy.train_global_batch_size
    if samples % batch:
        raise ConfigError(
            "policy.train_global_batch_size",
            batch,
            f"must divide {key}.num_prompts_per_step * {key}.num_generations_per_prompt = {samples}, "
            "so that a step is a whole number of optimizer steps",
        )
    check_micro_batch(config.policy)


def check_micro_batch(policy: PolicyConfig) -> None:
    _check_micro_batch_divides(policy.train_micro_batch_size, policy.train_global_batch_size)
    check_backend(policy, key="policy")
    check_router_replay(policy)
    check_batching(policy)


def _check_micro_batch_divides(micro_batch: int, batch: int) -> None:
    if batch % micro_batch:
        raise ConfigError(
            "policy.train_micro_batch_size", micro_batch, f"must divide policy.train_global_batch_size = {batch}"
        )


def _check_groups(config: TrainingRunConfig) -> None:
    if not isinstance(config, GRPORunConfig):
        return
    size, smallest = config.algorithm.num_generations_per_prompt, config.rollout.min_group_size
    if smallest > size > 1:
        key = f"{config.algorithm_key}.num_generations_per_prompt"
        raise ConfigError("rollout.min_group_size", smallest, f"must be at most {key} = {size}")


def _check_oversampling(config: TrainingRunConfig) -> None:
    """Refuse an early stop if groups are not collected one by one before each step."""
    factor, key = config.rollout.oversample, "rollout.oversample"
    if factor == 1:
        return
    if config.algorithm.background.enabled:
        problem = "must be 1: background collection begins the groups of later steps too, and keeps what a step leaves"
        raise ConfigError(key, factor, problem)
    if config.reward_model.shares_device:
        problem = "must be 1: scorers on the engine's device have their turn after the last rollout"
        raise ConfigError(key, factor, f"{problem}, or reward_model.enable_resource_pool: true")
    if isinstance(config, DistillationRunConfig) and config.distillation.off_policy:
        raise ConfigError(key, factor, "must be 1 with distillation.off_policy, which samples nothing")


def _check_validation_overlap(config: TrainingRunConfig) -> None:
    """Refuse validations beside rollouts if scorers have the engine's device between the two."""
    if config.algorithm.val_overlap and config.reward_model.shares_device:
        key = f"{config.algorithm_key}.val_overlap"
        problem = "must be false: scorers on the engine's device have their turn after the last rollout"
        raise ConfigError(key, True, f"{problem}, or reward_model.enable_resource_pool: true")


def _check_sampling(config: TrainingRunConfig) -> None:
    """Require samples that differ, and of the whole distribution if they are compared with a teacher's."""
    generation, path = config.policy.generation, "policy.generation"
    if generation.temperature == 0:
        raise ConfigError(
            f"{path}.temperature",
            0.0,
            f"training needs samples that differ: above 0 (for validation: {config.algorithm_key}.val_temperature)",
        )
    if not uses_teachers(config):
        return
    reason = "teachers' log-probs are of the whole distribution"
    found: list[ConfigError] = []
    if generation.top_p < 1:
        found.append(ConfigError(f"{path}.top_p", generation.top_p, f"{reason}: 1.0"))
    if generation.top_k is not None:
        found.append(ConfigError(f"{path}.top_k", generation.top_k, f"{reason}: null"))
    raise_config_errors(found)


def _check_lengths(config: RolloutRunConfig) -> None:
    policy, total = config.policy, config.policy.max_total_sequence_length
    limit = f"policy.max_total_sequence_length = {total}"
    new = policy.generation.max_new_tokens
    if new is not None and new > total:
        raise ConfigError("policy.generation.max_new_tokens", new, f"must be at most {limit}")
    prompt = config.data.max_input_seq_length
    if prompt is not None and prompt > total:
        raise ConfigError("data.max_input_seq_length", prompt, f"must be at most {limit}")


def _check_engine(config: TrainingRunConfig) -> None:
    section, key = config.policy.generation, "policy.generation"
    check = ENGINES.entry(section.backend, key=f"{key}.backend").check
    if check is not None:
        check(key, section, config)


def _check_layout(config: TrainingRunConfig) -> None:
    """Check the layout if the device is known; `auto` is resolved later, before a model loads, because it needs
    torch."""
    if config.policy.device != "auto":
        make_layout(config, config.policy.device)


def check_scheduler(config: TrainingRunConfig | SupervisedRunConfig | RewardModelRunConfig) -> None:
    """Require one scheduler, or a sequence with one milestone fewer than schedulers."""
    key, stages = "policy.scheduler", config.policy.scheduler
    if stages is None:
        return
    listed = [stages] if isinstance(stages, SchedulerStageConfig) else stages
    for stage in listed:
        if (stage.name is None) == (stage.milestones is None):
            raise ConfigError(key, stage.model_dump(), "each entry has either a name (and kwargs) or milestones")
    named = [stage for stage in listed if stage.name is not None]
    milestones = [step for stage in listed for step in stage.milestones or ()]
    if len(milestones) != len(named) - 1:
        raise ConfigError(
            key, milestones, f"{len(named)} schedulers follow each other at {max(len(named) - 1, 0)} milestones"
        )
    if milestones != sorted(set(milestones)):
        raise ConfigError(key, milestones, "milestones must increase")


def check_data(config: RolloutRunConfig | SupervisedRunConfig | RewardModelRunConfig) -> None:
    """Raise ConfigError unless each dataset and processor exists, has what it requires, and its files are there."""
    for field in config.data.dataset_fields:
        if getattr(config.data, field) == []:
            raise ConfigError(f"data.{field}", [], "must name a dataset")
    checks = [partial(_check_dataset, key, own) for key, own in config.data.datasets]
    run_checks((*checks, _check_mix), config)


def _check_mix(config: RolloutRunConfig | SupervisedRunConfig | RewardModelRunConfig) -> None:
    data = config.data
    if not isinstance(data, DataConfig) or data.train_mix is None:
        return
    if not isinstance(config, RolloutRunConfig):
        raise ConfigError("data.train_mix", data.train_mix, "supervised training does not read it; allowed: null")
    count = len(data.datasets_of("train"))
    if len(data.train_mix) != count:
        problem = f"needs a number of prompts for each dataset of data.train, {count} here"
        raise ConfigError("data.train_mix", data.train_mix, problem)


def _check_dataset(
    key: str, own: DatasetConfig, config: RolloutRunConfig | SupervisedRunConfig | RewardModelRunConfig
) -> None:
    is_supervised = isinstance(config, SupervisedRunConfig | RewardModelRunConfig)
    entry, section = resolve_dataset(own, config.data.default, key=key, supervised=is_supervised)
    if entry.open_prompts is not None and is_supervised:
        problem = "its rows are tasks of agents, without the answers that supervised training needs"
        raise ConfigError(f"{key}.dataset_name", section.dataset_name, problem)
    if entry.check is not None:
        entry.check(key, section, config)
    check_prompt_file(f"{key}.prompt_file", section.prompt_file)
    check_prompt_file(f"{key}.system_prompt_file", section.system_prompt_file)
    if section.processor is not None:
        PROCESSORS.entry(section.processor, key=f"{key}.processor")
    if section.images is not None:
        check_images(f"{key}.images", section.images)
        _check_image_rows(f"{key}.images", section.images, config)


def _check_image_rows(
    key: str, section: ImagesConfig, config: RolloutRunConfig | SupervisedRunConfig | RewardModelRunConfig
) -> None:
    """Raise ConfigError for runs in which rows with images cannot be sampled or trained on."""
    value = section.model_dump(exclude_unset=True)
    if isinstance(config, RewardModelRunConfig):
        raise ConfigError(key, value, "reward models read text; allowed: null, or DPO")
    if not isinstance(config, TrainingRunConfig):
        return
    if uses_teachers(config) and uses_cross_tokenizer(config):
        raise ConfigError(key, value, "teachers with tokenizers of their own read text; allowed: null")
    for name, teacher in config.teacher_sections.items():
        if teacher.server is not None:
            raise ConfigError(key, value, f"{name}.server is set, and served teachers read text; allowed: null")


def _check_env_names(config: RolloutRunConfig) -> None:
    for key, dataset in config.data.datasets:
        environment = config.data.default.env_name if dataset.env_name is None else dataset.env_name
        if environment is not None and environment not in config.env:
            problem = f"no such entry of env{suggest_name(environment, config.env)}"
            raise ConfigError(f"{key}.env_name", environment, problem)


_ROLLOUT_CHECKS: tuple[Callable[[RolloutRunConfig], None], ...] = (
    _check_lengths,
    check_environments,
    check_scorers,
    check_data,
    _check_env_names,
    check_speakers,
)
_TRAINING_CHECKS: tuple[Callable[[TrainingRunConfig], None], ...] = (
    _check_engine,
    _check_batches,
    _check_groups,
    _check_oversampling,
    _check_validation_overlap,
    _check_sampling,
    _check_layout,
    check_scheduler,
    check_async,
    check_checkpointing,
    check_teachers,
    check_teacher_batching,
    _check_replayed_pass,
)


def check_supervised(config: SupervisedRunConfig) -> None:
    """Raise ConfigError for the combinations that cannot run, all at once; files are only looked for."""
    checks: list[Callable[[Any], None]] = [check_scheduler, check_data, _check_unused_keys, _check_data_length]
    checks += [_check_supervised_metric, _check_supervised_policy, _check_no_replay]
    if isinstance(config, DPORunConfig):
        checks += [_check_pair_packing, _check_preference_loss]
    run_checks(checks, config)


def check_reward_model(config: RewardModelRunConfig) -> None:
    """Raise ConfigError for the combinations that cannot run, all at once; files are only looked for."""
    run_checks((check_scheduler, check_data, _check_unused_keys, _check_data_length, _check_pair_batches), config)


def _check_supervised_policy(config: SupervisedRunConfig) -> None:
    check_micro_batch(config.policy)
    if config.policy.device != "auto":
        make_policy_layout(config.policy, config.cluster, config.policy.device)


def _check_no_replay(config: SupervisedRunConfig) -> None:
    if config.policy.router_replay.enabled:
        raise ConfigError("policy.router_replay.enabled", True, "no engine samples what is trained on; allowed: false")


def _check_pair_batches(config: RewardModelRunConfig) -> None:
    _check_micro_batch_divides(config.policy.train_micro_batch_size, config.policy.train_global_batch_size)
    if config.checkpointing.metric_name == "val:loss" and not config.data.validates:
        raise ConfigError("checkpointing.metric_name", "val:loss", "needs a dataset in data.validation")


def _check_pair_packing(config: DPORunConfig) -> None:
    """Require micro-batches counted in tokens to hold both answers of any pair."""
    policy, pair = config.policy, 2 * config.max_tokens
    if policy.sequence_packing.share_prefixes:
        problem = "packs by prefixes may separate the two answers of a pair; allowed: false"
        raise ConfigError("policy.sequence_packing.share_prefixes", True, problem)
    for name in (PACKING, DYNAMIC):
        section = getattr(policy, name)
        if not section.enabled:
            continue
        tokens = section.train_mb_tokens or policy.train_micro_batch_size * policy.max_total_sequence_length
        if name == DYNAMIC:  # each answer is padded
            multiple = policy.dynamic_batching.sequence_length_round
            pair = 2 * multiple * math.ceil(config.max_tokens / multiple)
        if tokens * policy.ranks_per_limit < pair:
            least = math.ceil(pair / policy.ranks_per_limit)
            problem = f"the two answers of a pair are trained together: at least {least} tokens"
            raise ConfigError(f"policy.{name}.train_mb_tokens", section.train_mb_tokens, problem)


def _check_preference_loss(config: DPORunConfig) -> None:
    if config.dpo.preference_loss_weight == config.dpo.sft_loss_weight == 0:
        raise ConfigError("dpo.preference_loss_weight", 0.0, "there is no loss: this or dpo.sft_loss_weight above 0")
    if config.dpo.label_smoothing > 0 and config.dpo.loss_type != "sigmoid":
        problem = f"not read by dpo.loss_type: {config.dpo.loss_type}; allowed: 0"
        raise ConfigError("dpo.label_smoothing", config.dpo.label_smoothing, problem)


def _check_unused_keys(config: SupervisedRunConfig | RewardModelRunConfig) -> None:
    readers: dict[str, str] = dict.fromkeys(ROLLOUT_KEYS, "supervised training")
    if isinstance(config, SFTRunConfig):
        readers |= dict.fromkeys(PAIR_KEYS, "training on conversations")
    else:
        readers["output_key"] = "training on pairs"
    for section_key, dataset in (*config.data.datasets, ("data.default", config.data.default)):
        for key, reader in readers.items():
            if getattr(dataset, key) is not None:
                raise ConfigError(f"{section_key}.{key}", getattr(dataset, key), f"{reader} does not read it")


def _check_data_length(config: SupervisedRunConfig | RewardModelRunConfig) -> None:
    longest, total = config.data.max_input_seq_length, config.policy.max_total_sequence_length
    if longest is not None and longest > total:
        raise ConfigError(
            "data.max_input_seq_length", longest, f"must be at most policy.max_total_sequence_length = {total}"
        )


def _check_supervised_metric(config: SupervisedRunConfig) -> None:
    """Check the metric that ranks checkpoints."""
    metric = _ranking_metric(config, config.algorithm, config.algorithm_key, frozenset(), "loss")
    if metric is not None and metric.name.rpartition("/")[2].endswith("loss") and config.checkpointing.higher_is_better:
        raise ConfigError("checkpointing.higher_is_better", True, f"{metric.text} is better when it is lower: false")
