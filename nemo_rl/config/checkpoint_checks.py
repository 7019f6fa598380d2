"""Whether the metric that ranks checkpoints will exist."""

from nemo_rl.config.master import TrainingRunConfig
from nemo_rl.errors import ConfigError, suggest_name

KEY = "checkpointing.metric_name"
VALIDATION_METRICS = frozenset({"accuracy", "greedy_accuracy", "avg_length", "num_failed"})  # and pass_<k>
_TRAIN_NAMES = """
    loss grad_norm lr reward filtered_reward probs_ratio probs_ratio_min probs_ratio_max probs_ratio_clamped
    probs_ratio_clamped_min probs_ratio_clamped_max kl_penalty token_mult_prob_error gen_kl_error policy_kl_error
    js_divergence_error max_logprob_error sampling_importance_ratio approx_entropy num_valid_samples is_oob_ratio
    global_valid_seqs global_valid_toks mean_prompt_length total_num_tokens total_turns avg_turns_per_sample
    max_turns_per_sample natural_termination_rate truncation_rate max_turns_reached_rate mean_total_tokens_per_sample
    mean_gen_tokens_per_sample max_gen_tokens_per_sample mean_env_tokens_per_sample num_rollouts shaped_reward
    num_nonfinite_generation_logprobs train_flops avg_trajectory_age dynamic_sampling_num_gen_batches
    dynamic_sampling_num_discarded_valid_samples
"""
TRAIN_METRICS = frozenset(_TRAIN_NAMES.split())


def check_checkpointing(config: TrainingRunConfig) -> None:
    """Raise ConfigError for a metric of an unknown name, or one that this run never computes.

    A name with a slash ("val:<data set>/accuracy", "train:advantages/mean") depends on the data and is checked when
    the first checkpoint is written.
    """
    metric = config.checkpointing.metric_name
    if not config.checkpointing.enabled or metric is None:
        return
    kind, _, name = metric.partition(":")
    if kind not in ("val", "train") or not name:
        raise ConfigError(KEY, metric, 'must be "val:" or "train:" and a metric\'s name, e.g. "val:accuracy"')
    known = VALIDATION_METRICS | _pass_metrics(config) if kind == "val" else TRAIN_METRICS
    if "/" not in name and name not in known:
        raise ConfigError(KEY, metric, f"no such metric{suggest_name(name, known)}")
    if kind == "val":
        _check_validation_runs(config, metric, name)


def _check_validation_runs(config: TrainingRunConfig, metric: str, name: str) -> None:
    algorithm, section = config.algorithm, config.algorithm_key
    if config.data.validation is None:
        raise ConfigError(KEY, metric, "needs a data set in data.validation; without one use train:reward or null")
    if algorithm.val_period == 0 and not algorithm.val_at_end:
        raise ConfigError(KEY, metric, f"needs {section}.val_period above 0, or {section}.val_at_end")
    if name.rpartition("/")[2] == "greedy_accuracy" and not algorithm.val_greedy:
        raise ConfigError(KEY, metric, f"needs {section}.val_greedy: true")


def _pass_metrics(config: TrainingRunConfig) -> frozenset[str]:
    k = config.algorithm.val_num_generations_per_prompt
    return frozenset({f"pass_{k}"} if k > 1 else ())
