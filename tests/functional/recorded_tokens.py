"""What the engine sampled and what is trained, of runs through recorded_grpo.py that write token ids."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, TypeAlias

Calls: TypeAlias = Counter[tuple[tuple[int, ...], tuple[int, ...]]]  # (tokens before it, its tokens) of each call


def sampled_calls(record: Path) -> Calls:
    """Count the answers of the engine in a file of recorded_grpo.py."""
    return Counter((tuple(prompt), tuple(tokens)) for prompt, tokens in map(json.loads, record.open()))


def trained_calls(rows: list[dict[str, Any]]) -> Calls:
    """Count the messages of rollouts that are trained on."""
    found: Calls = Counter()
    for row in rows:
        for log in (row["messages"], *row.get("other_chains", ())):
            before: tuple[int, ...] = ()
            for message in log:
                tokens = tuple(message["token_ids"])
                if "generation_logprobs" in message:
                    found[before, tokens] += 1
                before += tokens
    return found
