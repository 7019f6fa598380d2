import json
import math
from pathlib import Path

from nemo_rl.observability.summary import (
    LINE_MARK,
    VALIDATION_MARK,
    format_summary,
    plot_reward_curve,
    read_metric,
    summarize_rewards,
)


def plotted(curve: str, mark: str) -> list[int]:
    """Numbers of the lines that show a mark, the title left out."""
    return [number for number, line in enumerate(curve.splitlines()) if number and mark in line]


def test_curve_rises_with_the_rewards() -> None:
    curve = plot_reward_curve({step: step / 20 for step in range(1, 21)}, {0: 0.1, 20: 0.5}, width=60, height=14)
    lines = curve.splitlines()
    assert "training reward" in lines[0]
    assert "validation reward" in lines[0]
    assert len(lines) == 14
    assert max(len(line) for line in lines) <= 60
    columns = [lines[number].index(LINE_MARK) for number in plotted(curve, LINE_MARK)]
    assert columns == sorted(columns, reverse=True)
    assert len(plotted(curve, VALIDATION_MARK)) == 2
    assert "\x1b" not in curve


def test_scale_is_zero_to_one_for_shares_only() -> None:
    assert "1.00" in plot_reward_curve({1: 0.2, 2: 0.3})
    assert "30.0" in plot_reward_curve({1: -5.0, 2: 30.0})


def test_a_curve_leaves_nothing_behind_for_the_next() -> None:
    first = plot_reward_curve({1: 0.2, 2: 0.3})
    plot_reward_curve({1: -5.0, 2: 30.0}, {3: 7.0})
    assert plot_reward_curve({1: 0.2, 2: 0.3}) == first


def test_no_curve_of_fewer_than_two_finite_points() -> None:
    assert plot_reward_curve({}) == ""
    assert plot_reward_curve({1: 0.5, 2: math.nan}) == ""
    assert plot_reward_curve({1: 0.5}, {1: 0.5}) == ""


def test_ticks_are_whole_steps() -> None:
    axis = plot_reward_curve(dict.fromkeys(range(1, 31), 0.5)).splitlines()[-2]
    assert axis.split() == ["5", "10", "15", "20", "25", "30"]


def write_metrics(path: Path, *lines: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_results_are_the_curve_and_the_first_and_last_values(tmp_path: Path) -> None:
    path = write_metrics(
        tmp_path / "metrics.jsonl",
        {"step": 0, "validation/reward": 0.125, "validation/accuracy": 0.0},
        {"step": 1, "train/reward": 0.25},
        {"step": 2, "train/reward": 0.5},
        {"step": 2, "validation/reward": 0.75, "validation/accuracy": 0.5},
    )
    lines = summarize_rewards(path).splitlines()
    assert lines[:-3] == plot_reward_curve({1: 0.25, 2: 0.5}, {0: 0.125, 2: 0.75}).splitlines()
    assert lines[-3:] == [
        "Training reward 0.250 at step 1, 0.500 at step 2",
        "Validation reward 0.125 at step 0, 0.750 at step 2",
        "Validation accuracy 0.000 at step 0, 0.500 at step 2",
    ]


def test_summary_says_where_things_are_and_how_to_continue() -> None:
    text = format_summary(
        "results",
        metrics_path=Path("runs/exp_001/metrics.jsonl"),
        checkpoint=Path("runs/exp_001/checkpoints/step_2"),
        continue_command="uv run examples/run_grpo.py grpo.max_num_steps=4",
    )
    assert text.splitlines() == [
        "results",
        "Metrics     runs/exp_001/metrics.jsonl",
        "Checkpoint  runs/exp_001/checkpoints/step_2",
        "Look        nemo-rl view runs/exp_001",
        "Continue    uv run examples/run_grpo.py grpo.max_num_steps=4",
    ]


def test_summary_of_a_run_without_steps() -> None:
    path = Path("no/metrics.jsonl")
    text = format_summary(summarize_rewards(path), metrics_path=path)
    assert text.splitlines() == [
        "Metrics     no/metrics.jsonl",
        "Checkpoint  none (checkpointing.enabled=true saves one)",
        "Look        nemo-rl view no",
    ]


def test_a_metric_takes_the_last_value_of_a_step(tmp_path: Path) -> None:
    path = write_metrics(
        tmp_path / "metrics.jsonl",
        {"step": 2, "train/reward": 0.5},
        {"step": 2, "validation/accuracy": 0.75},
        {"step": 1, "train/reward": 0.25, "train/loss": "NaN"},
        {"step": 2, "train/reward": 0.625},
    )
    with path.open("a") as file:
        file.write('{"step": 3, "train/rew')
    assert read_metric(path, "train/reward") == {1: 0.25, 2: 0.625}
