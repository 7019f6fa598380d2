"""Closing summary of a run: its reward curve, where its files are, how to look at them and to continue."""

import json
import math
import shlex
from collections.abc import Mapping
from pathlib import Path

CURVE_WIDTH = 72  # columns
CURVE_HEIGHT = 16  # lines
LINE_MARK = "•"
VALIDATION_MARK = "◆"


def plot_reward_curve(
    rewards: Mapping[int, float],
    validation_rewards: Mapping[int, float] | None = None,
    *,
    width: int = CURVE_WIDTH,
    height: int = CURVE_HEIGHT,
) -> str:
    """Return a plain-text plot of the mean reward of each training step and of each validation.

    Values that are not finite are dropped; with fewer than two points the result is "".
    """
    rewards = _drop_nonfinite(rewards)
    validation_rewards = _drop_nonfinite(validation_rewards or {})
    if len({*rewards, *validation_rewards}) < 2:
        return ""
    import plotext  # draws on one figure of its module

    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, height)
    figure.theme("colorless")
    for values, mark in ((rewards, LINE_MARK), (validation_rewards, VALIDATION_MARK)):
        if values:
            signal = figure.signal(list(values), list(values.values()), marker=mark)
            figure.draw(signal.lines() if mark == LINE_MARK else signal)
    if all(0 <= value <= 1 for value in [*rewards.values(), *validation_rewards.values()]):
        figure.ruler("y").lim(0, 1)
    figure.ruler("x").ticks(_choose_ticks({*rewards, *validation_rewards}))
    named = ((rewards, f"{LINE_MARK} training reward"), (validation_rewards, f"{VALIDATION_MARK} validation reward"))
    figure.title("   ".join(name for values, name in named if values))
    figure.label("step")
    lines = figure.build().string(colorless=True).splitlines()
    figure.clear()
    return "\n".join(line.rstrip() for line in lines).rstrip()


def format_summary(
    results: str,
    *,
    metrics_path: Path,
    checkpoint: Path | None = None,
    continue_command: str | None = None,
    lost: str = "",
) -> str:
    """Return the text at the end of a run; `continue_command`, and records that are `lost`, are shown unchanged."""
    lines = [
        *([results] if results else []),
        f"Metrics     {metrics_path}",
        *([f"Lost        {lost}"] if lost else []),
        f"Checkpoint  {checkpoint or 'none (checkpointing.enabled=true saves one)'}",
        f"Look        nemo-rl view {shlex.quote(str(metrics_path.parent))}",
        *([f"Continue    {continue_command}"] if continue_command else []),
    ]
    return "\n".join(lines)


def summarize_rewards(metrics_path: Path) -> str:
    """Return the curve and the first and last of the rewards and accuracies in `metrics.jsonl`; "" without any."""
    names = ("train/reward", "validation/reward", "validation/accuracy")
    rewards, validation_rewards, accuracies = (read_metric(metrics_path, name) for name in names)
    parts = [
        plot_reward_curve(rewards, validation_rewards),
        _format_first_and_last("Training reward", rewards),
        _format_first_and_last("Validation reward", validation_rewards),
        _format_first_and_last("Validation accuracy", accuracies),
    ]
    return "\n".join(filter(None, parts))


def summarize_losses(metrics_path: Path) -> str:
    """Return the first and last of the losses in `metrics.jsonl`; "" without any."""
    losses, validation_losses = (read_metric(metrics_path, name) for name in ("train/loss", "validation/loss"))
    parts = [
        _format_first_and_last("Training loss", losses),
        _format_first_and_last("Validation loss", validation_losses),
    ]
    return "\n".join(filter(None, parts))


def read_metric(metrics_path: Path, name: str) -> dict[int, float]:
    """Return a metric by step, the value logged last for a step; empty if there is no such file."""
    values: dict[int, float] = {}
    for line in metrics_path.read_text(encoding="utf-8").splitlines() if metrics_path.exists() else ():
        try:
            metrics = json.loads(line)
        except ValueError:  # the last line of a run that was killed
            continue
        if name in metrics:
            values[metrics["step"]] = float(metrics[name])
    return dict(sorted(values.items()))


def _choose_ticks(steps: set[int]) -> list[int]:
    """Return at most eight steps, a round number apart."""
    first, last = min(steps), max(steps)
    magnitude = 10 ** max(0, math.floor(math.log10((last - first) / 7)))
    apart = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude * 7 >= last - first)
    return list(range(-(-first // apart) * apart, last + 1, apart))


def _format_first_and_last(name: str, values: Mapping[int, float]) -> str:
    if not values:
        return ""
    first, last = min(values), max(values)
    if first == last:
        return f"{name} {values[first]:.3f} at step {first}"
    return f"{name} {values[first]:.3f} at step {first}, {values[last]:.3f} at step {last}"


def _drop_nonfinite(values: Mapping[int, float]) -> dict[int, float]:
    return {step: float(value) for step, value in sorted(values.items()) if math.isfinite(value)}
