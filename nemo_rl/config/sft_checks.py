"""Rules of `examples/run_sft.py` that the schema cannot express."""

from nemo_rl.config.checks import KEY as METRIC_NAME
from nemo_rl.config.checks import check_data, check_micro_batch, check_scheduler
from nemo_rl.config.layout import make_policy_layout
from nemo_rl.config.sft import SFTRunConfig
from nemo_rl.errors import ConfigError, suggest_name
from nemo_rl.metric_names import ranking_metrics

UNUSED_DATASET_KEYS = ("env_name", "agent_name", "processor")  # dataset keys that only rollouts read


def check_sft(config: SFTRunConfig) -> None:
    """Raise ConfigError for the first combination that cannot run; files are only looked for."""
    check_micro_batch(config.policy)
    check_scheduler(config)
    check_data(config)
    _check_unused_keys(config)
    _check_lengths(config)
    _check_metric(config)
    if config.policy.device != "auto":
        make_policy_layout(config.policy, config.cluster, config.policy.device)


def _check_unused_keys(config: SFTRunConfig) -> None:
    for section_key, dataset in (*config.data.datasets, ("data.default", config.data.default)):
        for key in UNUSED_DATASET_KEYS:
            if getattr(dataset, key) is not None:
                raise ConfigError(f"{section_key}.{key}", getattr(dataset, key), "supervised training does not read it")


def _check_lengths(config: SFTRunConfig) -> None:
    longest, total = config.data.max_input_seq_length, config.policy.max_total_sequence_length
    if longest is not None and longest > total:
        raise ConfigError(
            "data.max_input_seq_length", longest, f"must be at most policy.max_total_sequence_length = {total}"
        )


def _check_metric(config: SFTRunConfig) -> None:
    """Check the metric that ranks checkpoints; a name with a slash ("val:<dataset>/loss") is checked at the first
    checkpoint."""
    metric = config.checkpointing.metric_name
    if not config.checkpointing.enabled or metric is None:
        return
    kind, _, name = metric.partition(":")
    if kind not in ("val", "train") or not name:
        raise ConfigError(METRIC_NAME, metric, 'must be "val:" or "train:" and a metric\'s name, e.g. "val:loss"')
    known = ranking_metrics(kind, "sft")
    if "/" not in name and name not in known:
        raise ConfigError(METRIC_NAME, metric, f"no such metric{suggest_name(name, known)}")
    if kind == "val" and config.data.validation is None:
        raise ConfigError(METRIC_NAME, metric, "needs a dataset in data.validation; without one use null")
    if kind == "val" and config.sft.val_period == 0 and not config.sft.val_at_end:
        raise ConfigError(METRIC_NAME, metric, "needs sft.val_period above 0, or sft.val_at_end")
    if name.rpartition("/")[2] == "loss" and config.checkpointing.higher_is_better:
        raise ConfigError("checkpointing.higher_is_better", True, f"{metric} is better when it is lower: false")
