from pathlib import Path

from nemo_rl.metric_names import METRIC_GROUPS, find_undocumented, ranking_metrics, render_metrics_page

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
NAMES = [name for group in METRIC_GROUPS for name in group.meanings]


def test_page_of_metrics_is_generated() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_metrics_page()


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
    assert {"accuracy", "greedy_accuracy", "avg_length", "num_failed"} == ranking_metrics("val", "grpo")
    assert ranking_metrics("val", "sft") == {"loss"}


def test_names_are_matched_by_word() -> None:
    known = ["train/loss", "train/failures/infra", "train/env/math/reward_mean", "validation/pass_4"]
    assert find_undocumented([*known, "train/losses", "train/failures/a/b", "loss"]) == [
        "train/losses",
        "train/failures/a/b",
        "loss",
    ]
