"""The pages: what each shows, as the context of its template. The server and the export render the same pages.

A page's address is its path and its parameters; every filter is one of them, so that a view can be sent as a link.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from typing import Any
from urllib.parse import quote, urlencode

import numpy as np
from markupsafe import Markup

from nemo_rl.errors import DataError
from nemo_rl.viewer import charts, conversation
from nemo_rl.viewer.charts import Line
from nemo_rl.viewer.index import Query
from nemo_rl.viewer.sources import Key, RolloutSet, Source, Sources, try_read

PAGE_ROWS = 50
MAX_GROUPS = 200  # of a step's page
MAX_ID_CHARS = 500  # of an id in an address
MAX_OPTIONS = 500  # of a filter
MAX_STEPS = 400  # in the table of a run
ALARM_MULT_PROB_ERROR = 1.05  # docs/metrics.md

CURVES: tuple[tuple[str, Mapping[str, str], float | None], ...] = (
    (
        "Reward",
        {"train": "train/reward", "validation": "validation/accuracy", "greedy": "validation/greedy_accuracy"},
        None,
    ),
    (
        "Response length (tokens)",
        {"mean": "train/mean_gen_tokens_per_sample", "longest": "train/max_gen_tokens_per_sample"},
        None,
    ),
    ("Truncated share", {"truncated": "train/truncation_rate", "turn limit": "train/max_turns_reached_rate"}, None),
    ("Log-prob error against the engine", {"mean of exp|Δ|": "train/token_mult_prob_error"}, ALARM_MULT_PROB_ERROR),
    ("Entropy", {"entropy": "train/approx_entropy"}, None),
    ("Loss", {"loss": "train/loss", "validation": "validation/loss"}, None),
    ("Gradient norm", {"norm": "train/grad_norm"}, None),
    ("Age of the rollouts (steps)", {"mean": "train/avg_trajectory_age", "highest": "train/max_trajectory_age"}, None),
    ("KL from the reference", {"KL": "train/kl_penalty"}, None),
)
PHASE_PREFIX = "timing/train/"


@dataclass(frozen=True, slots=True)
class Page:
    """A template and its context; `live` names the source whose changes the page follows."""

    template: str
    title: str
    context: Mapping[str, Any]
    live: str = ""


def address(path: str, **parameters: object) -> str:
    """Return the address of a page; empty parameters are omitted.

    Example: address("/s/exp_001/rollouts", step=3, text="") is "/s/exp_001/rollouts?step=3".
    """
    given = {name.rstrip("_"): value for name, value in parameters.items() if value not in (None, "")}
    return quote(path) + (f"?{urlencode(given, errors='replace')}" if given else "")


def parse_query(values: Mapping[str, str]) -> tuple[Query, list[str]]:
    """Return the filters of an address, and what is wrong with those that cannot be read."""
    found: dict[str, Any] = {}
    problems = []
    for field in fields(Query):
        text = values.get(field.name, "").strip()
        if not text:
            continue
        try:
            kind = str if field.type is str else float if "float" in str(field.type) else int
            found[field.name] = kind(text)
        except ValueError:
            problems.append(f"{field.name} = {text!r} is not a number")
    return replace(Query(), **found), problems


def runs_page(sources: Sources) -> Page:
    rows = []
    for source in sources.in_order():
        reward = source.metrics.series("train/reward") or {}
        accuracy = source.metrics.series("validation/accuracy")
        rollouts = next(iter(source.splits.values()))
        rows.append(
            {
                "source": source,
                "step": max(source.metrics.steps, default=None),
                "rollouts": sum(map(len, source.splits.values())),
                "failed": sum(
                    sum(len(rows) for _, rows in split.select(Query(failure="any"))) for split in source.splits.values()
                ),
                "reward": list(reward.values())[-1] if reward else _mean(rollouts.column("reward")),
                "accuracy": list(accuracy.values())[-1] if accuracy else None,
            }
        )
    return Page("runs.html", "Runs", {"rows": rows})


def source_page(source: Source, values: Mapping[str, str]) -> Page:
    """Return the page of a run or of a collection."""
    return _collection_page(source, values) if source.kind == "collection" else _run_page(source, values)


def _run_page(source: Source, values: Mapping[str, str]) -> Page:
    metrics = source.metrics

    def draw(resolve: Callable[[str], str | None], title: str, names: Mapping[str, str], alarm: float | None) -> Markup:
        lines = [Line(label, metrics.series(name)) for label, name in names.items()]
        return charts.line_chart(title, lines, alarm=alarm, link=lambda step: resolve(f"/s/{source.id}/step/{step}"))

    pictures = [
        partial(draw, title=title, names=names, alarm=alarm)
        for title, names, alarm in CURVES
        if any(metrics.series(name) for name in names.values())
    ]
    phases = [
        Line(name.removeprefix(PHASE_PREFIX).replace("_", " "), metrics.series(name))
        for name in sorted(metrics.by_name)
        if name.startswith(PHASE_PREFIX) and not name.endswith("total_step_time")
    ]
    stacked = charts.stacked_chart("Seconds per step, by phase", phases)
    steps = metrics.steps or sorted({int(s) for s in source.split("train").column("step").tolist()})
    shown = steps[-MAX_STEPS:]
    table = [
        (
            step,
            [
                metrics.by_name.get(name, {}).get(step)
                for name in (
                    "train/reward",
                    "validation/accuracy",
                    "train/mean_gen_tokens_per_sample",
                    "train/truncation_rate",
                    "train/loss",
                    "timing/train/total_step_time",
                )
            ],
        )
        for step in reversed(shown)
    ]
    context = {
        "source": source,
        "charts": pictures,
        "phases": stacked,
        "failures": source.failures("train"),
        "steps": table,
        "num_hidden": len(steps) - len(shown),
        "config": source.config_text,
    }
    return Page("run.html", source.id, context, live=source.id)


def _collection_page(source: Source, values: Mapping[str, str]) -> Page:
    rollouts = source.split("rollouts")
    tasks, rewards, columns = task_rewards(rollouts)
    order = values.get("sort", "")
    means = np.array([float(np.nanmean(row)) if not np.isnan(row).all() else np.nan for row in rewards])
    ranks = np.argsort(means if order == "reward" else -means if order == "-reward" else tasks, kind="stable")
    start = _whole(values.get("start"))
    context = {
        "source": source,
        "summary": conversation.pass_at_k_summary(rewards),
        "histogram": charts.histogram("Tasks by mean reward", _buckets(means)),
        "tasks": [
            {"task": int(tasks[i]), "mean": means[i], "rewards": rewards[i].tolist(), "best": np.nanmax(rewards[i])}
            for i in ranks[start : start + PAGE_ROWS]
            if not np.isnan(rewards[i]).all()
        ],
        "num_tasks": len(tasks),
        "columns": columns,
        "start": start,
        "sort": order,
        "attempts": source.failed_attempts(limit=100),
        "config": source.config_text,
    }
    return Page("collection.html", source.id, context, live=source.id)


def step_page(source: Source, step: int) -> Page:
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
                "address": _group_address(source, "train", keys[members[0]], row),
                "task": str(row.get("task_name", "")),
                "prompt": conversation.prompt_text(row),
                "count": len(members),
                "failed": int((columns["failure"][members] > 0).sum()),
                "mean": float(known.mean()) if len(known) else None,
                "low": float(known.min()) if len(known) else None,
                "high": float(known.max()) if len(known) else None,
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
        "total": total,
        "metrics": metrics,
        "histogram": charts.histogram("Rollouts by reward", _buckets(columns["reward"])),
        "previous": max((s for s in steps if s < step), default=None),
        "next": min((s for s in steps if s > step), default=None),
    }
    return Page("step.html", f"step {step} · {source.id}", context, live=source.id)


def group_page(source: Source, split: str, values: Mapping[str, str]) -> Page:
    """Return the page of a group: the rollouts of one prompt side by side."""
    query, _ = parse_query({name: values.get(name, "") for name in ("group", "step", "task_index", "prompt")})
    if like := values.get("like"):
        row = source.split(split).read(parse_key(like))
        query = Query(group=str(row.get("group_id", "")), step=row.get("step"))
    keys, total = source.split(split).keys(query, limit=64)
    cards = [_card(source, split, key, row) for key in keys if (row := try_read(source.split(split), key))]
    if not cards:
        raise DataError(f"{source.id} has no such group")
    cards.sort(key=lambda card: card["row"].get("generation_index", card["row"].get("rollout_index", 0)))
    context = {
        "source": source,
        "split": split,
        "step": query.step,
        "name": query.group[:MAX_ID_CHARS]
        or (f"task {query.task_index}" if query.task_index is not None else query.prompt),
        "cards": cards,
        "total": total,
        "prompt": conversation.prompt_text(cards[0]["row"], limit=4000),
        "mean": _mean(np.array([_number(card["row"].get("reward")) for card in cards])),
    }
    return Page("group.html", f"group · {source.id}", context)


def rollouts_page(source: Source, split: str, values: Mapping[str, str]) -> Page:
    """Return the list of rollouts that pass the filters."""
    rollouts = source.split(split)
    query, problems = parse_query(values)
    start = _whole(values.get("start"))
    if query.text:
        keys, resume_at = rollouts.search(query, limit=PAGE_ROWS, offset=start)
        total = None
    else:
        keys, total = rollouts.keys(query, limit=PAGE_ROWS, offset=start)
        resume_at = start + PAGE_ROWS if start + PAGE_ROWS < total else None
    rows = []
    for key in keys:
        row = try_read(rollouts, key)
        if row is None:
            problems.append(f"rollout {key[0]}.{key[1]} cannot be read: its file was changed")
        else:
            rows.append(_card(source, split, key, row, details=False))
    filters = {name: value for name, value in values.items() if name != "start" and value}
    context = {
        "source": source,
        "split": split,
        "rows": rows,
        "total": total,
        "start": start,
        "searched": len(rollouts) if resume_at is None else resume_at,
        "next": None
        if resume_at is None
        else address(f"/s/{source.id}/rollouts/{split}", **{**filters, "start": resume_at}),
        "filters": {field.name: values.get(field.name, "") for field in fields(Query)},
        "problems": problems,
        "tasks": _options(rollouts, "task"),
        "stops": _options(rollouts, "stop"),
        "failures": _options(rollouts, "failure"),
    }
    return Page("rollouts.html", f"{split} rollouts · {source.id}", context, live=source.id)


def rollout_page(source: Source, split: str, name: str, values: Mapping[str, str]) -> Page:
    """Return the page of one rollout. `name`: file.row in its split."""
    key = parse_key(name)
    rollouts = source.split(split)
    row = rollouts.read(key)
    chains = conversation.chains_of(row)
    chain = min(_whole(values.get("chain")), len(chains) - 1)
    details = source.find_details(row, chain) if split == "train" else None
    colour = values.get("color", "policy")
    tokens = conversation.colour_tokens(details, colour, start=_whole(values.get("tokens"))) if details else None
    context = {
        "source": source,
        "split": split,
        "key": name,
        "row": row,
        "failure": row.get("failure") or None,
        "turns": conversation.turns_of(chains[chain]),
        "chain": chain,
        "histories": conversation.histories(chains),
        "details": details,
        "tokens": tokens,
        "color": colour if colour in conversation.COLOURS else "policy",
        "colors": conversation.COLOURS,
        "rewards": {str(k): v for k, v in _mapping(row.get("rewards")).items()},
        "timings": {str(k): v for k, v in _mapping(row.get("timings")).items()},
        "group": _group_address(source, split, key, row),
        "previous": f"{key[0]}.{key[1] - 1}" if key[1] else None,
        "next": f"{key[0]}.{key[1] + 1}" if key[1] + 1 < len(rollouts.indexes[key[0]]) else None,
    }
    return Page("rollout.html", f"rollout {name} · {source.id}", context)


def text_page(source: Source, split: str, name: str, values: Mapping[str, str]) -> Page:
    """Return a part of one message that is too long for the page of its rollout."""
    row = source.split(split).read(parse_key(name))
    chain, message = _whole(values.get("chain")), _whole(values.get("message"))
    chains = conversation.chains_of(row)
    if chain >= len(chains) or message >= len(chains[chain]):
        raise DataError(f"rollout {name} has no message {message}")
    text = conversation.message_text(chains[chain][message])
    start = _whole(values.get("start"))
    context = {
        "source": source,
        "split": split,
        "key": name,
        "chain": chain,
        "message": message,
        "start": start,
        "text": conversation.show(text[start : start + conversation.TEXT_PAGE_CHARS]),
        "length": len(text),
        "end": min(len(text), start + conversation.TEXT_PAGE_CHARS),
        "page_chars": conversation.TEXT_PAGE_CHARS,
    }
    return Page("text.html", f"message {message} of rollout {name}", context)


def validation_page(source: Source, values: Mapping[str, str]) -> Page:
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
            sides.append((step, [_card(source, "validation", k, r) for k in keys if (r := try_read(rollouts, k))]))
        context |= {"sides": sides}
        return Page("validation.html", f"validation · {source.id}", context, live=source.id)
    means = {step: _means(prompt_of, reward_of, step_of == step) for step in (first, second)}
    common = [number for number in means[first] if number in means[second]]
    common.sort(key=lambda number: means[second][number] - means[first][number])
    order = values.get("order", "worse")
    common = common[::-1] if order == "better" else common
    start = _whole(values.get("start"))
    rows = []
    for number in common[start : start + PAGE_ROWS]:
        file, at = _locate(rollouts, int(np.flatnonzero(prompt_of == number)[0]))
        row = try_read(rollouts, (file, at))
        if row is not None:
            rows.append(
                {
                    "prompt": str(row.get("prompt_id", "")),
                    "text": conversation.prompt_text(row),
                    "first": means[first][number],
                    "second": means[second][number],
                }
            )
    context |= {"rows": rows, "num_prompts": len(common), "start": start, "order": order}
    return Page("validation.html", f"validation · {source.id}", context, live=source.id)


def task_rewards(rollouts: RolloutSet) -> tuple[Any, Any, int]:
    """Return the tasks of a collection, their rewards [T, N] (NaN: missing), and N."""
    task, seed, repeat, reward = (rollouts.column(name) for name in ("task_index", "seed", "generation", "reward"))
    if not len(task):
        return np.empty(0, np.int64), np.empty((0, 0)), 0
    tasks, row = np.unique(task, return_inverse=True)
    seeds, seed_number = np.unique(seed, return_inverse=True)
    repeats = int(repeat.max()) + 1
    rewards = np.full((len(tasks), len(seeds) * repeats), np.nan)
    rewards[row, seed_number * repeats + repeat.astype(np.int64)] = reward
    return tasks, rewards, rewards.shape[1]


def parse_key(name: str) -> Key:
    """Return the key that an address names: file.row. Raises DataError for another text."""
    file, _, row = name.partition(".")
    if not (file.isascii() and file.isdigit() and row.isascii() and row.isdigit() and len(name) < 24):
        raise DataError(f"there is no rollout {name!r}")
    return int(file), int(row)


def _card(source: Source, split: str, key: Key, row: dict[str, Any], *, details: bool = True) -> dict[str, Any]:
    """Return what a list or a side-by-side view shows of a rollout."""
    found = source.find_details(row) if details and split == "train" else None
    advantages = (found or {}).get("advantages") or []
    advantage = (found or {}).get("advantage")
    if advantage is None and advantages:
        advantage = float(np.mean([a for a in advantages if a is not None]))
    return {
        "key": f"{key[0]}.{key[1]}",
        "row": row,
        "failure": row.get("failure") or None,
        "advantage": advantage,
        "answer": conversation.final_text(row),
        "group": _group_address(source, split, key, row),
    }


def _group_address(source: Source, split: str, key: Key, row: Mapping[str, Any]) -> str:
    """Return the address of a rollout's group: by its id, or where that is too long by the rollout."""
    path = f"/s/{source.id}/group/{split}"
    if len(str(row.get("group_id", ""))) > MAX_ID_CHARS:
        return address(path, like=f"{key[0]}.{key[1]}")
    if row.get("group_id"):
        return address(path, group=row["group_id"], step=row.get("step"))
    return address(path, task_index=row.get("task_index"))


def _options(rollouts: RolloutSet, column: str) -> list[str]:
    """Return the names to choose from, without those that no address can hold."""
    names = (name for name in rollouts.names(column) if len(name) <= MAX_ID_CHARS and conversation.show(name) == name)
    return list(islice(names, MAX_OPTIONS))


def _take(rollouts: RolloutSet, name: str, keys: list[Key]) -> Any:
    index = rollouts.indexes[0]
    return np.asarray(index.columns[name][[row for _, row in keys]]) if keys else np.empty(0)


def _locate(rollouts: RolloutSet, number: int) -> Key:
    """Return the key of a row that is counted over all files."""
    for file, index in enumerate(rollouts.indexes):
        if number < len(index):
            return file, number
        number -= len(index)
    raise DataError("there is no such rollout")


def _means(prompts: Any, rewards: Any, chosen: Any) -> dict[int, float]:
    chosen = chosen & ~np.isnan(rewards)
    if not chosen.any():
        return {}
    numbers, row = np.unique(prompts[chosen], return_inverse=True)
    means = np.bincount(row, weights=rewards[chosen]) / np.bincount(row)
    return dict(zip(numbers.tolist(), means.tolist(), strict=True))


def _buckets(values: Any, count: int = 10) -> list[tuple[str, int]]:
    values = values[np.isfinite(values)]
    if not len(values):
        return []
    low, high = float(values.min()), float(values.max())
    if low == high:
        return [(charts.format_number(low), len(values))]
    numbers, edges = np.histogram(values, bins=count, range=(min(low, 0.0), max(high, 1.0)))
    return [(charts.format_number(round(float(edge), 3)), int(n)) for edge, n in zip(edges, numbers, strict=False)]


def _choose(text: str | None, allowed: list[int], default: int) -> int:
    return next((step for step in allowed if str(step) == text), default)


def _whole(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 12 else 0


def _mean(values: Any) -> float | None:
    values = np.asarray(values, np.float64)
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else None


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")


def _mapping(value: object) -> Mapping[Any, Any]:
    return value if isinstance(value, dict) else {}
