from nemo_rl.compat.tables import load_table
from nemo_rl.metric_names import METRIC_GROUPS, ranking_metrics
from tests.support.metric_names import find_undocumented

NAMES = [name for group in METRIC_GROUPS for name in group.meanings]


def test_no_metric_stands_twice() -> None:
    assert len(NAMES) == len(set(NAMES))


def test_every_plain_train_metric_in_the_table_may_rank_the_checkpoints_of_some_algorithm() -> None:
    plain = {name.removeprefix("train/") for name in NAMES if name.startswith("train/") and name.count("/") == 1}
    ranking = frozenset[str]().union(
        *(ranking_metrics("train", a) for a in ("grpo", "distillation", "sft", "dpo", "rm"))
    )
    assert plain <= ranking


def test_algorithms_rank_by_metrics_of_their_own() -> None:
    assert "forward_kl" in ranking_metrics("train", "distillation")
    assert "forward_kl" not in ranking_metrics("train", "grpo")
    assert {"reward", "greedy_reward", "accuracy", "greedy_accuracy", "avg_length", "num_failed"} == ranking_metrics(
        "val", "grpo"
    )
    assert ranking_metrics("val", "sft") == {"loss"}


def test_names_are_matched_by_word() -> None:
    known = ["train/loss", "train/failures/infra", "train/env/math/reward_mean", "validation/pass_4"]
    assert find_undocumented([*known, "train/losses", "train/failures/a/b", "loss"]) == [
        "train/losses",
        "train/failures/a/b",
        "loss",
    ]


# Names that the functional tests and suites of NeMo-RL's main branch of August 2026 assert on.
NEMO_RL_NAMES = (
    "gen_fleet/shards/dead",
    "ray/node.0.gpu.0.mem_gb",
    "refit/delta/changed_pct",
    "refit/transfer/payloads",
    "refit/transfer/relay_flush_s",
    "router/serving_backends",
    "score",
    "timing/train/generation",
    "timing/train/policy_training",
    "timing/train/total_step_time",
    "train/accuracy",
    "train/avg_trajectory_age",
    "train/critic/explained_var",
    "train/critic/grad_norm",
    "train/critic/loss",
    "train/draft_loss",
    "train/filtered_reward",
    "train/gen_kl_error",
    "train/global_valid_seqs",
    "train/global_valid_toks",
    "train/grad_norm",
    "train/kl_loss_t0",
    "train/kl_loss_t1",
    "train/loss",
    "train/max_seq_mult_prob_error",
    "train/mean_gen_tokens_per_sample",
    "train/num_masked_seqs_by_logprob_error",
    "train/num_valid_samples",
    "train/preference_loss",
    "train/probs_ratio",
    "train/probs_ratio_clamped_max",
    "train/probs_ratio_clamped_min",
    "train/reward",
    "train/sampling_importance_ratio",
    "train/sft_loss",
    "train/token_mult_prob_error",
    "validation/accuracy",
    "validation/kl_loss",
    "validation/val_loss",
)


def test_every_name_that_nemo_rls_suites_assert_on_exists_or_has_a_replacement() -> None:
    replaced = {name.strip() for names in load_table("releases")["metric_names"] for name in names.split(",")}
    assert set(find_undocumented(NEMO_RL_NAMES)) <= replaced
