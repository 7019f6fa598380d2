"""The pages of a training step, and of the validation rollouts of two steps."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from nemo_rl.errors import DataError
from nemo_rl.viewer import charts, conversation
from nemo_rl.viewer.group_pages import count_outcomes, outcome_of
from nemo_rl.viewer.index import Query
from nemo_rl.viewer.page import (
    PAGE_ROWS,
    Page,
    finite_mean,
    group_address,
    histogram_buckets,
    rollout_card,
    whole_number,
)
from nemo_rl.viewer.rollout_set import Key, RolloutSet, try_read
from nemo_rl.viewer.viewer_sources import ViewerSource

MAX_GROUPS = 200  # groups on the page of a step


def step_page(source: ViewerSource, step: int) -> Page:
    """Return the page of a training step: its groups and its metrics."""
    rollouts = source.split("train")
    keys, total = rollouts.keys(Query(step=step), limit=1 << 20)
    columns = {name: _take(rollouts, name, keys) for name in ("reward", "tokens", "group", "failure", "stop")}
    groups = []
    for number in list(dict.fromkeys(columns["group"].tolist()))[:MAX_GROUPS]:
        members = np.flatnonzero(columns["group"] == number)
        row = try_read(rollouts, keys[members[0]])
        if row is None:
            continue
        rewards = columns["reward"][members]
        known = rewards[~np.isnan(rewards)]
        groups.append(
            {
                "id": str(row.get("group_id", "")),
                "address": group_address(source, "train", keys[members[0]], row),
                "env": str(row.get("env", row.get("task_name", ""))),
                "prompt": conversation.prompt_text(row),
                "target": conversation.target_of(row),
                "count": len(members),
                "failed": int((columns["failure"][members] > 0).sum()),
                "mean": float(known.mean()) if len(known) else None,
                "low": float(known.min()) if len(known) else None,
                "high": float(known.max()) if len(known) else None,
                "outcome": outcome_of(known),
                "tokens": float(columns["tokens"][members].mean()),
            }
        )
    metrics = source.metrics.at(step)
    if not (groups or metrics):
        raise DataError(f"{source.id} has no step {step} (yet)")
    steps = source.metrics.steps
    context = {
        "source": source,
        "step": step,
        "groups": groups,
        "num_groups": len(set(columns["group"].tolist())),
        "outcomes": count_outcomes(source, step),
        "total": total,
        "metrics": metrics,
        "histogram": charts.histogram("Rollouts by reward", histogram_buckets(columns["reward"])),
        "previous": max((s for s in steps if s < step), default=None),
        "next": min((s for s in steps if s > step), default=None),
    }
    return Page("step.html", f"step {step} · {source.id}", context, live=source.id)


def validation_page(source: ViewerSource, values: Mapping[str, str]) -> Page:
    """Return the validation rollouts of two steps side by side, prompt by prompt."""
    rollouts = source.split("validation")
    step_of, prompt_of, reward_of = (rollouts.column(name) for name in ("step", "prompt", "reward"))
    steps = sorted({int(step) for step in step_of.tolist()})
    if not steps:
        raise DataError(f"{source.id} has no validation rollouts (yet)")
    first = _choose(values.get("first"), steps, steps[0])
    second = _choose(values.get("second"), steps, steps[-1])
    prompt = values.get("prompt", "")
    context: dict[str, Any] = {"source": source, "steps": steps, "first": first, "second": second, "prompt": prompt}
    if prompt:
        sides = []
        for step in (first, second):
            keys, _ = rollouts.keys(Query(prompt=prompt, step=step), limit=16)
            sides.append(
                (step, [rollout_card(source, "validation", k, r) for k in keys if (r := try_read(rollouts, k))])
            )
        context |= {"sides": sides}
        return Page("validation.html", f"validation · {source.id}", context, live=source.id)
    means = {step: _means(prompt_of, reward_of, step_of == step) for step in (first, second)}
    common = [number for number in means[first] if number in means[second]]
    common.sort(key=lambda number: means[second][number] - means[first][number])
    order = values.get("order", "worse")
    common = common[::-1] if order == "better" else common
    start = whole_number(values.get("start"))
    changes = np.array([means[second][number] - means[first][number] for number in common])
    rows = []
    for number in common[start : start + PAGE_ROWS]:
        row = try_read(rollouts, rollouts.key_at(int(np.flatnonzero(prompt_of == number)[0])))
        if row is not None:
            rows.append(
                {
                    "prompt": str(row.get("prompt_id", "")),
                    "text": conversation.prompt_text(row),
                    "target": conversation.target_of(row),
                    "first": means[first][number],
                    "second": means[second][number],
                }
            )
    summary = {"better": changes > 0, "equal": changes == 0, "worse": changes < 0}
    context |= {
        "rows": rows,
        "num_prompts": len(common),
        "start": start,
        "order": order,
        "summary": {name: int(chosen.sum()) for name, chosen in summary.items()},
        "mean_change": finite_mean(changes),
    }
    return Page("validation.html", f"validation · {source.id}", context, live=source.id)


def _take(rollouts: RolloutSet, name: str, keys: list[Key]) -> Any:
    index = rollouts.indexes[0]
    return np.asarray(index.columns[name][[row for _, row in keys]]) if keys else np.empty(0)


def _means(prompts: Any, rewards: Any, chosen: Any) -> dict[int, float]:
    chosen = chosen & ~np.isnan(rewards)
    if not chosen.any():
        return {}
    numbers, row = np.unique(prompts[chosen], return_inverse=True)
    means = np.bincount(row, weights=rewards[chosen]) / np.bincount(row)
    return dict(zip(numbers.tolist(), means.tolist(), strict=True))


def _choose(text: str | None, allowed: list[int], default: int) -> int:
    return next((step for step in allowed if str(step) == text), default)
