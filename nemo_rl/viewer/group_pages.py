"""The pages of groups: those of a run by outcome, the rollouts of one side by side, the difference of two of them."""

import difflib
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from nemo_rl.errors import DataError
from nemo_rl.viewer import conversation
from nemo_rl.viewer.distributions import OUTCOMES, GroupTable, Outcome, group_table
from nemo_rl.viewer.index import Query
from nemo_rl.viewer.page import (
    MAX_ID_CHARS,
    PAGE_ROWS,
    Page,
    finite_mean,
    group_address,
    parse_key,
    parse_query,
    rollout_card,
    whole_number,
)
from nemo_rl.viewer.rollout_set import RolloutSet, try_read
from nemo_rl.viewer.viewer_sources import ViewerSource

MAX_MEMBERS = 64  # rollouts of a group on a page
MAX_COMPARED_CHARS = 20_000  # per answer
_WORD = re.compile(r"\s+|\w+|[^\w\s]")


def outcome_of(rewards: Any) -> Outcome | None:
    """Return the outcome of a group with these rewards [N], as `GroupTable.outcome`; None without any."""
    if not len(rewards):
        return None
    return "wrong" if rewards.max() <= 0 else "right" if rewards.min() >= 1 else "mixed"


def count_outcomes(source: ViewerSource, step: int | None = None) -> dict[Outcome, int]:
    """Return the number of training groups of each outcome, of one step or of all."""
    groups = _groups(source)
    chosen = groups.step == step if step is not None else np.ones(len(groups.step), np.bool_)
    return {name: int((groups.outcome(name) & chosen).sum()) for name in OUTCOMES}


def groups_page(source: ViewerSource, values: Mapping[str, str]) -> Page:
    """Return the list of the training groups, of one outcome and step if the address names them, newest first."""
    rollouts, groups = source.split("train"), _groups(source)
    outcome: Outcome | None = next((name for name in OUTCOMES if name == values.get("outcome")), None)
    step = whole_number(values["step"]) if values.get("step") else None
    chosen = np.ones(len(groups.step), np.bool_) if outcome is None else groups.outcome(outcome)
    if step is not None:
        chosen = chosen & (groups.step == step)
    numbers = np.flatnonzero(chosen)
    numbers = numbers[np.argsort(-groups.step[numbers], kind="stable")]
    start = whole_number(values.get("start"))
    rows = []
    for number in numbers[start : start + PAGE_ROWS].tolist():
        key = rollouts.key_at(int(groups.row[number]))
        if (row := try_read(rollouts, key)) is not None:
            rows.append(_group_row(groups, number, group_address(source, "train", key, row), row))
    context = {
        "source": source,
        "rows": rows,
        "outcome": outcome,
        "step": step,
        "counts": count_outcomes(source, step),
        "total": len(numbers),
        "start": start,
        "page_rows": PAGE_ROWS,
    }
    return Page("groups.html", f"groups · {source.id}", context, live=source.id)


def _group_row(groups: GroupTable, number: int, address: str, row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": str(row.get("group_id", "")),
        "address": address,
        "step": int(groups.step[number]),
        "env": str(row.get("env", row.get("task_name", ""))),
        "prompt": conversation.prompt_text(row),
        "target": conversation.target_of(row),
        "count": int(groups.count[number]),
        "mean": float(groups.mean[number]),
        "low": float(groups.low[number]),
        "high": float(groups.high[number]),
        "outcome": next(name for name in OUTCOMES if groups.outcome(name)[number]),
    }


def _groups(source: ViewerSource) -> GroupTable:
    return source.remember("groups", lambda: group_table(source.split("train")))


def group_page(source: ViewerSource, split: str, values: Mapping[str, str]) -> Page:
    """Return the page of a group: the rollouts of one prompt side by side."""
    query, _ = parse_query({name: values.get(name, "") for name in ("group", "step", "task_index", "prompt")})
    if like := values.get("like"):
        row = source.split(split).read(parse_key(like))
        query = Query(group=str(row.get("group_id", "")), step=row.get("step"))
    keys, total = source.split(split).keys(query, limit=MAX_MEMBERS)
    cards = [rollout_card(source, split, key, row) for key in keys if (row := try_read(source.split(split), key))]
    if not cards:
        problem = f"{len(keys)} damaged rows: {'; '.join(source.split(split).notes)}" if keys else "has no such group"
        raise DataError(f"{source.id}: {problem}" if keys else f"{source.id} {problem}")
    cards.sort(key=lambda card: card["row"].get("generation_index", card["row"].get("rollout_index", 0)))
    rewards = np.array([_number(card["row"].get("reward")) for card in cards])
    known = [card for card in cards if math.isfinite(_number(card["row"].get("reward")))]
    known.sort(key=lambda card: -card["row"]["reward"])
    context = {
        "source": source,
        "split": split,
        "extremes": (known[0]["key"], known[-1]["key"]) if len(known) > 1 else None,
        "step": query.step,
        "name": query.group[:MAX_ID_CHARS]
        or (f"task {query.task_index}" if query.task_index is not None else query.prompt),
        "cards": cards,
        "total": total,
        "prompt": conversation.prompt_text(cards[0]["row"], limit=4000),
        "mean": finite_mean(rewards),
        "outcome": outcome_of(rewards[np.isfinite(rewards)]),
        "target": conversation.target_of(cards[0]["row"]),
    }
    return Page("group.html", f"group · {source.id}", context)


def difference_page(source: ViewerSource, split: str, values: Mapping[str, str]) -> Page:
    """Return the answers of two rollouts side by side, with the words marked that only one of them has."""
    rollouts, names = source.split(split), (values.get("first", ""), values.get("second", ""))
    keys = [parse_key(name) for name in names]
    rows = [rollouts.read(key) for key in keys]
    same, sides = _mark_differences(*(conversation.answer_text(row, limit=MAX_COMPARED_CHARS) for row in rows))
    context = {
        "source": source,
        "split": split,
        "names": names,
        "cards": [rollout_card(source, split, key, row) for key, row in zip(keys, rows, strict=True)],
        "sides": sides,
        "same": same,
        "members": _members(rollouts, rows[0], names),
        "prompt": conversation.prompt_text(rows[0], limit=4000),
        "target": conversation.target_of(rows[0]),
    }
    return Page("difference.html", f"rollouts {' and '.join(names)} · {source.id}", context)


def _members(rollouts: RolloutSet, row: Mapping[str, Any], shown: tuple[str, ...]) -> list[tuple[str, float]]:
    """Return key and reward of the rollouts that can be chosen: those of the row's group, and what is shown."""
    query = Query(group=str(row.get("group_id", "")), step=row.get("step"), task_index=row.get("task_index"))
    keys = rollouts.keys(query, limit=MAX_MEMBERS)[0]
    names = dict.fromkeys((*(f"{file}.{at}" for file, at in keys), *shown))
    return [(name, rollouts.value("reward", parse_key(name))) for name in names]


def _mark_differences(first: str, second: str) -> tuple[float, list[list[tuple[str, bool]]]]:
    """Return the share of words in common, and each text as parts: text, and whether only this side has it."""
    words = [_WORD.findall(text) for text in (first, second)]
    matcher = difflib.SequenceMatcher(None, *words, autojunk=len(words[0]) > 2000)
    codes = matcher.get_opcodes()
    sides = [
        [("".join(words[0][start:end]), tag != "equal") for tag, start, end, _, _ in codes],
        [("".join(words[1][start:end]), tag != "equal") for tag, _, _, start, end in codes],
    ]
    return matcher.ratio(), [[part for part in side if part[0]] for side in sides]


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else float("nan")
