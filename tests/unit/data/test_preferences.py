import json
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.data.preferences import Preference, read_preferences
from nemo_rl.errors import DataError
from nemo_rl.types import Message


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_prompt_is_a_text_or_messages(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    rows = ({"prompt": "q", "chosen": "a", "rejected": "b"}, {"messages": messages, "chosen": "c", "rejected": ""})
    first, second = read_preferences(write(tmp_path / "pairs.jsonl", *rows))
    assert first == Preference((Message("user", "q"),), "a", "b")
    assert second.conversations == (
        (Message("system", "s"), Message("user", "q"), Message("assistant", "c")),
        (Message("system", "s"), Message("user", "q"), Message("assistant", "")),
    )


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"chosen": "a", "rejected": "b"}, "prompt must be a text"),
        ({"prompt": "q", "rejected": "b"}, "chosen must be a text"),
        ({"prompt": "q", "chosen": "a", "rejected": ["b"]}, "rejected must be a text"),
        ({"messages": [], "chosen": "a", "rejected": "b"}, "messages must be a list"),
        (
            {"messages": [{"role": "human", "content": "q"}], "chosen": "a", "rejected": "b"},
            "a message's role is 'human'",
        ),
    ],
)
def test_a_row_that_cannot_be_read_is_named(tmp_path: Path, row: Any, said: str) -> None:
    path = write(tmp_path / "pairs.jsonl", {"prompt": "q", "chosen": "a", "rejected": "b"}, row)
    with pytest.raises(DataError, match=rf"pairs\.jsonl: row 2: {said}"):
        read_preferences(path)
