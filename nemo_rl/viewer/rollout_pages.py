"""The pages of rollouts: the filtered list, one rollout, and a message that is too long for its page."""

from collections.abc import Mapping
from dataclasses import fields
from itertools import islice
from typing import Any

from nemo_rl.errors import DataError
from nemo_rl.viewer import conversation
from nemo_rl.viewer.index import Query
from nemo_rl.viewer.page import (
    MAX_ID_CHARS,
    PAGE_ROWS,
    Page,
    address,
    group_address,
    parse_key,
    parse_query,
    rollout_card,
    whole_number,
)
from nemo_rl.viewer.rollout_set import RolloutSet
from nemo_rl.viewer.viewer_sources import ViewerSource

TARGET_CHARS = 4000  # the expected answer on a rollout's page
MAX_PICTURES = 16  # pictures on a rollout's page
MAX_OPTIONS = 500  # choices of a filter


def rollouts_page(source: ViewerSource, split: str, values: Mapping[str, str]) -> Page:
    """Return the list of rollouts that pass the filters."""
    rollouts = source.split(split)
    query, problems = parse_query(values)
    start = whole_number(values.get("start"))
    if query.text:
        keys, resume_at = rollouts.search(query, limit=PAGE_ROWS, offset=start)
        total = None
    else:
        keys, total = rollouts.keys(query, limit=PAGE_ROWS, offset=start)
        resume_at = start + PAGE_ROWS if start + PAGE_ROWS < total else None
    rows = []
    for key in keys:
        try:
            rows.append(rollout_card(source, split, key, rollouts.read(key), details=False))
        except DataError as error:
            problems.append(f"rollout {key[0]}.{key[1]}: {error}")
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
        "envs": _options(rollouts, "env"),
        "stops": _options(rollouts, "stop"),
        "failures": _options(rollouts, "failure"),
    }
    return Page("rollouts.html", f"{split} rollouts · {source.id}", context, live=source.id)


def rollout_page(source: ViewerSource, split: str, name: str, values: Mapping[str, str]) -> Page:
    """Return the page of one rollout. `name`: file.row in its split."""
    key = parse_key(name)
    rollouts = source.split(split)
    row = rollouts.read(key)
    chains = conversation.chains_of(row)
    chain = min(whole_number(values.get("chain")), len(chains) - 1)
    details = source.find_details(row, chain) if split == "train" else None
    colour = values.get("color", "policy")
    colour = colour if colour in conversation.COLOURS else "policy"
    tokens = conversation.colour_tokens(details, colour, start=whole_number(values.get("tokens"))) if details else None
    find = values.get("find", "").strip()[:MAX_ID_CHARS]
    turns = conversation.turns_of(chains[chain])
    first_turns: dict[str, int] = {}  # by image; later turns link to it
    for turn in turns:
        for digest in turn["images"]:
            first_turns.setdefault(digest, turn["number"])
    pictures = {digest: source.picture(digest) for digest in list(first_turns)[:MAX_PICTURES]}
    context = {
        "source": source,
        "split": split,
        "key": name,
        "row": row,
        "find": find,
        "num_found": sum(turn["searched"].count(find.lower()) for turn in turns) if find else 0,
        "target": conversation.target_of(row, limit=TARGET_CHARS),
        "verdict": _verdict(row),
        "state": _mapping(row.get("env_state")),
        "failure": row.get("failure") or None,
        "turns": turns,
        "pictures": {digest: url for digest, url in pictures.items() if url is not None},
        "first_turns": first_turns,
        "chain": chain,
        "histories": conversation.histories(chains),
        "details": details,
        "tokens": tokens,
        "color": colour,
        "scale": conversation.colour_scale(colour),
        "colors": conversation.COLOURS,
        "rewards": {str(k): v for k, v in _mapping(row.get("rewards")).items()},
        "timings": {str(k): v for k, v in _mapping(row.get("timings")).items()},
        "group": group_address(source, split, key, row),
        "previous": f"{key[0]}.{key[1] - 1}" if key[1] else None,
        "next": f"{key[0]}.{key[1] + 1}" if key[1] + 1 < len(rollouts.indexes[key[0]]) else None,
    }
    return Page("rollout.html", f"rollout {name} · {source.id}", context)


def text_page(source: ViewerSource, split: str, name: str, values: Mapping[str, str]) -> Page:
    """Return a part of one message that is too long for the page of its rollout."""
    row = source.split(split).read(parse_key(name))
    chain, message = whole_number(values.get("chain")), whole_number(values.get("message"))
    chains = conversation.chains_of(row)
    if chain >= len(chains) or message >= len(chains[chain]):
        raise DataError(f"rollout {name} has no message {message}")
    text = conversation.message_text(chains[chain][message])
    start = whole_number(values.get("start"))
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


def _options(rollouts: RolloutSet, column: str) -> list[str]:
    """Return the names to choose from, without those that no address can hold."""
    names = (name for name in rollouts.names(column) if len(name) <= MAX_ID_CHARS and conversation.show(name) == name)
    return list(islice(names, MAX_OPTIONS))


def _verdict(row: Mapping[str, Any]) -> str:
    """Return the verdict of the reward on a rollout: failed, right (at least 1), wrong (0 or less), partly right."""
    reward = row.get("reward")
    if row.get("failure") or not isinstance(reward, int | float):
        return "failed" if row.get("failure") else "not scored"
    return "right" if reward >= 1 else "wrong" if reward <= 0 else "partly right"


def _mapping(value: object) -> Mapping[Any, Any]:
    return value if isinstance(value, dict) else {}
