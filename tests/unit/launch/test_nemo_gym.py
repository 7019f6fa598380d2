"""A run whose rollouts are those of a scripted NeMo Gym stack, from its configuration."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.distributed.machine import unused_port
from nemo_rl.errors import ConfigError
from nemo_rl.launch.training import run_training
from tests.fakes.gym_stack import FakeGymStack, row_of, spell_and_play
from tests.unit.launch.conftest import Recipe


def train(recipe: Recipe, folder: Path, rows: Sequence[Any], *overrides: str) -> FakeGymStack:
    """Train on rows of a stack with the agents "spell" and "play"; the stack, which has ended."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    async def main() -> FakeGymStack:
        port = unused_port()
        stack = spell_and_play(port)
        async with stack:
            config = recipe(
                f"++env.gym={{type: nemo_gym, head_url: '{stack.head_url}', start_timeout_s: 60}}",
                f"data.train={{dataset_name: nemo_gym, data_path: {folder / 'rows.jsonl'}, env_name: gym}}",
                f"++gateway={{port: {port}, tool_parser: null}}",
                "policy.max_total_sequence_length=64",
                *overrides,
            )
            await run_training(config, "uv run train.py")
        return stack

    return asyncio.run(main())


@pytest.mark.usefixtures("process_state")
def test_a_run_trains_on_the_rollouts_of_the_agents_that_its_rows_name(recipe: Recipe, tmp_path: Path) -> None:
    rows = [row_of(letter, agent) for letter, agent in zip("abcd", ("spell", "play") * 2, strict=True)]
    stack = train(recipe, tmp_path, rows)
    assert {agent for agent, _ in stack.rows} == {"spell", "play"}
    (directory,) = (tmp_path / "runs").iterdir()
    written = [json.loads(line) for line in (directory / "rollouts" / "train.jsonl").read_text().splitlines()]
    assert len(written) == 6
    assert all(row["failure"] is None for row in written)
    assert {row["task_name"] for row in written} == {"gym"}
    assert all(row["rewards"].keys() == {"gym"} for row in written)


@pytest.mark.usefixtures("process_state")
def test_an_agent_that_no_stack_has_is_named_before_anything_is_generated(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="spel"):
        train(recipe, tmp_path, [row_of("a", "spel")])
    assert not list(tmp_path.glob("runs/*/rollouts/train.jsonl"))
