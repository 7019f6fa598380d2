"""A page, its address, and what several pages show alike.

A page's address is its path and its parameters; every filter is a parameter, so that a view can be sent as a link.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any
from urllib.parse import quote, urlencode

import numpy as np

from nemo_rl.errors import DataError
from nemo_rl.viewer import charts, conversation
from nemo_rl.viewer.index import Query
from nemo_rl.viewer.rollout_set import Key
from nemo_rl.viewer.viewer_sources import ViewerSource

PAGE_ROWS = 50
SNIPPET_CHARS = 200  # the end of an answer, shown in a list
MAX_ID_CHARS = 500  # longest id in an address
ALARM_MULT_PROB_ERROR = 1.05  # docs/metrics.md


@dataclass(frozen=True, slots=True)
class Page:
    """A template and its context; `live` names the source whose changes the page follows."""

    template: str
    title: str
    context: Mapping[str, Any]
    live: str = ""


def address(path: str, **parameters: object) -> str:
    """Return the address of a page; empty parameters are omitted, and lists repeat theirs.

    Example: address("/s/exp_001/rollouts", step=3, text="") is "/s/exp_001/rollouts?step=3".
    """
    given = {name.rstrip("_"): value for name, value in parameters.items() if value not in (None, "")}
    return quote(path) + (f"?{urlencode(given, doseq=True, errors='replace')}" if given else "")


def parse_query(values: Mapping[str, str]) -> tuple[Query, list[str]]:
    """Return the filters of an address, and the problems of those that cannot be parsed."""
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


def parse_key(name: str) -> Key:
    """Return the key that an address names: file.row. Raises DataError for another text."""
    file, _, row = name.partition(".")
    if not (file.isascii() and file.isdigit() and row.isascii() and row.isdigit() and len(name) < 24):
        raise DataError(f"there is no rollout {name!r}")
    return int(file), int(row)


def whole_number(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 12 else 0


def rollout_card(
    source: ViewerSource, split: str, key: Key, row: dict[str, Any], *, details: bool = True
) -> dict[str, Any]:
    """Return the values of a rollout for a list or a side-by-side view."""
    found = source.find_details(row) if details and split == "train" else None
    advantages = (found or {}).get("advantages") or []
    advantage = (found or {}).get("advantage")
    if advantage is None and advantages:
        advantage = finite_mean([a for a in advantages if a is not None])
    thinking, answer = conversation.split_answer(conversation.final_text(row))
    return {
        "key": f"{key[0]}.{key[1]}",
        "row": row,
        "failure": row.get("failure") or None,
        "advantage": advantage,
        "prompt": conversation.prompt_text(row),
        "target": conversation.target_of(row),
        "thinking": thinking,
        "answer": answer,
        "end": ("…" if len(answer) > SNIPPET_CHARS else "") + answer[-SNIPPET_CHARS:],
        "group": group_address(source, split, key, row),
    }


def group_address(source: ViewerSource, split: str, key: Key, row: Mapping[str, Any]) -> str:
    """Return the address of a rollout's group: by its id, or by the rollout if the id is too long."""
    path = f"/s/{source.id}/group/{split}"
    if len(str(row.get("group_id", ""))) > MAX_ID_CHARS:
        return address(path, like=f"{key[0]}.{key[1]}")
    if row.get("group_id"):
        return address(path, group=row["group_id"], step=row.get("step"))
    return address(path, task_index=row.get("task_index"))


def histogram_buckets(values: Any, count: int = 10) -> list[tuple[str, int]]:
    values = values[np.isfinite(values)]
    if not len(values):
        return []
    low, high = float(values.min()), float(values.max())
    if low == high:
        return [(charts.format_number(low), len(values))]
    numbers, edges = np.histogram(values, bins=count, range=(min(low, 0.0), max(high, 1.0)))
    return [(charts.format_number(round(float(edge), 3)), int(n)) for edge, n in zip(edges, numbers, strict=False)]


def finite_mean(values: Any) -> float | None:
    values = np.asarray(values, np.float64)
    values = values[np.isfinite(values)]
    return float(values.mean()) if len(values) else None
