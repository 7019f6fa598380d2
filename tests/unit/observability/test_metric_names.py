from pathlib import Path

from nemo_rl.observability.metric_names import METRICS, find_undocumented, render_metrics_table

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_page_of_metrics_is_generated() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_metrics_table()


def test_no_metric_stands_twice() -> None:
    names = [name for metrics in METRICS.values() for name in metrics]
    assert len(names) == len(set(names))


def test_names_are_matched_by_word() -> None:
    known = ["train/loss", "train/failures/infra", "train/env/math/reward_mean", "validation/pass_4"]
    assert find_undocumented([*known, "train/losses", "train/failures/a/b", "loss"]) == [
        "train/losses",
        "train/failures/a/b",
        "loss",
    ]
