import json
import math
from pathlib import Path

from nemo_rl.observability.summary import ACCURACY_MARK, LINE_MARK, read_history, reward_curve, summary


def plotted(curve: str, mark: str) -> list[int]:
    """Numbers of the lines that show a mark, the title left out."""
    return [number for number, line in enumerate(curve.splitlines()) if number and mark in line]


def test_curve_rises_with_the_rewards() -> None:
    curve = reward_curve({step: step / 20 for step in range(1, 21)}, {0: 0.1, 20: 0.5}, width=60, height=14)
    lines = curve.splitlines()
    assert "training reward" in lines[0]
    assert "validation accuracy" in lines[0]
    assert len(lines) == 14
    assert max(len(line) for line in lines) <= 60
    columns = [lines[number].index(LINE_MARK) for number in plotted(curve, LINE_MARK)]
    assert columns == sorted(columns, reverse=True)
    assert len(plotted(curve, ACCURACY_MARK)) == 2
    assert "\x1b" not in curve


def test_scale_is_zero_to_one_for_shares_only() -> None:
    assert "1.00" in reward_curve({1: 0.2, 2: 0.3})
    assert "30.0" in reward_curve({1: -5.0, 2: 30.0})


def test_a_curve_leaves_nothing_behind_for_the_next() -> None:
    first = reward_curve({1: 0.2, 2: 0.3})
    reward_curve({1: -5.0, 2: 30.0}, {3: 7.0})
    assert reward_curve({1: 0.2, 2: 0.3}) == first


def test_no_curve_of_fewer_than_two_finite_points() -> None:
    assert reward_curve({}) == ""
    assert reward_curve({1: 0.5, 2: math.nan}) == ""
    assert reward_curve({1: 0.5}, {1: 0.5}) == ""


def test_ticks_are_whole_steps() -> None:
    axis = reward_curve(dict.fromkeys(range(1, 31), 0.5)).splitlines()[-2]
    assert axis.split() == ["5", "10", "15", "20", "25", "30"]


def test_summary_says_where_things_are_and_how_to_continue() -> None:
    text = summary(
        rewards={1: 0.25, 2: 0.5},
        accuracies={0: 0.125, 2: 0.75},
        metrics_path=Path("runs/exp_001/metrics.jsonl"),
        checkpoint=Path("runs/exp_001/checkpoints/step_2"),
        continue_command="uv run examples/run_grpo.py grpo.max_num_steps=4",
    )
    assert text.splitlines()[-5:] == [
        "Training reward 0.250 at step 1, 0.500 at step 2",
        "Validation accuracy 0.125 at step 0, 0.750 at step 2",
        "Metrics     runs/exp_001/metrics.jsonl",
        "Checkpoint  runs/exp_001/checkpoints/step_2",
        "Continue    uv run examples/run_grpo.py grpo.max_num_steps=4",
    ]


def test_summary_of_a_run_without_steps() -> None:
    text = summary(rewards={}, accuracies={}, metrics_path=Path("metrics.jsonl"))
    assert text.splitlines() == [
        "Metrics     metrics.jsonl",
        "Checkpoint  none (checkpointing.enabled=true saves one)",
    ]


def test_history_takes_the_last_value_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"step": 2, "train/reward": 0.5},
        {"step": 2, "validation/accuracy": 0.75},
        {"step": 1, "train/reward": 0.25, "train/loss": "NaN"},
        {"step": 2, "train/reward": 0.625},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "train/rew')
    assert read_history(path) == ({1: 0.25, 2: 0.625}, {2: 0.75})
