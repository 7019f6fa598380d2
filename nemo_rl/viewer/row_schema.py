"""Fields that the pages read of a row of rollouts or of their details, with their types."""

from typing import Annotated, Any

import msgspec

MAX_DEPTH = 200  # nesting of a row

_Whole = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
_Numbers = list[float | None]


class _Message(msgspec.Struct, gc=False):
    role: str = ""
    content: Any = None
    parts: list[Any] | None = None
    tool_calls: list[Any] | None = None
    weight_spans: list[Any] | None = None
    policy: str = ""


class _Row(msgspec.Struct, gc=False):
    """Fields that are absent have their default; fields that are not named here may hold anything."""

    step: _Whole | None = None
    group_id: str = ""
    prompt_id: str = ""
    task_name: str = ""
    env: str = ""
    task_index: _Whole | None = None
    generation_index: _Whole = 0
    rollout_index: _Whole = 0
    stop_reason: str = ""
    reward: float | None = None
    rewards: dict[str, float | None] | None = None
    env_state: dict[str, Any] | None = None
    failure: dict[str, Any] | None = None
    num_turns: _Whole = 0
    num_tokens: _Whole = 0
    num_generated_tokens: _Whole = 0
    weight_versions: list[Any] = []
    timings: dict[str, float | None] | None = None
    messages: list[_Message] | None = None
    other_chains: list[list[_Message]] | None = None
    # written to rollouts/details.jsonl
    chain: _Whole = 0
    text: list[Any] = []
    mask: str = ""
    policy_logprobs: _Numbers | None = None
    engine_logprobs: _Numbers | None = None
    advantages: _Numbers | None = None
    advantage: float | None = None
    num_omitted: _Whole = 0


def check_row(values: dict[str, Any]) -> None:
    """Raise ValueError, which names the field, for a row that the pages cannot show."""
    level: list[Any] = [values]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for value in level
            for item in (value.values() if isinstance(value, dict) else value)
            if isinstance(item, dict | list)
        ]
    if level:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    try:
        msgspec.convert(values, _Row)
    except OverflowError as error:
        raise ValueError(str(error)) from error
