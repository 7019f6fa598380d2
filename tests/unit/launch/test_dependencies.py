"""A run whose rollouts are those of a scripted NeMo Gym stack, from its configuration."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from nemo_rl.data.chat import ChatEncoder
from nemo_rl.distributed.machine import unused_port
from nemo_rl.errors import ConfigError
from nemo_rl.experience.agents import CommandAgent, FunctionAgent
from nemo_rl.launch.dependencies import make_agents, make_codec
from nemo_rl.launch.training import run_training
from nemo_rl.types import Prompt
from tests.fakes.gym_stack import FakeGymStack, row_of, spell_and_play
from tests.templates import byte_tokenizer
from tests.unit.launch.conftest import Recipe

AGENT = "++env.asker={type: agent, function: 'tests.unit.launch.test_dependencies:ask', scored_by: letters}"


def ask(prompt: Prompt, base_url: str, api_key: str) -> None:
    with OpenAI(base_url=base_url, api_key=api_key, timeout=120.0) as client:
        messages = [{"role": "user", "content": prompt.messages[0].content}]
        client.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]


@pytest.mark.usefixtures("process_state")
def test_a_run_trains_on_an_agents_rollouts_beside_those_of_an_environment(recipe: Recipe, tmp_path: Path) -> None:
    rows = [{"input": letter, "output": letter} for letter in "xyz"]
    (tmp_path / "others.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    both = (
        f"data.train=[{{dataset_name: jsonl, data_path: {tmp_path / 'data.jsonl'}, env_name: asker}}, "
        f"{{dataset_name: jsonl, data_path: {tmp_path / 'others.jsonl'}, env_name: letters}}]"
    )
    config = recipe(AGENT, both, "grpo.num_prompts_per_step=4", "policy.train_global_batch_size=12")
    asyncio.run(run_training(config, "uv run train.py"))
    (directory,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (directory / "rollouts" / "train.jsonl").read_text().splitlines()]
    assert {row["task_name"] for row in rows} == {"asker", "letters"}
    assert all(row["failure"] is None for row in rows)
    assert all(row["rewards"] == {"letters": float(len(row["messages"][-1]["content"]))} for row in rows)


def test_agents_are_functions_or_commands(recipe: Recipe) -> None:
    agents = make_agents(recipe(AGENT, "++env.program={type: agent, command: [cat]}"))
    assert isinstance(agents["asker"], FunctionAgent)
    assert isinstance(agents["program"], CommandAgent)
    assert agents.keys() == {"asker", "program"}


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("tests.unit.launch.test_dependencies:aks", "did you mean ask"),
        ("tests.unit.launch.test_dependencies:AGENT", "not a function"),
    ],
)
def test_a_function_that_is_not_there_is_named(recipe: Recipe, function: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        make_agents(recipe(AGENT, f"env.asker.function={function}"))
    assert caught.value.key == "env.asker.function"


def test_a_template_without_tools_needs_a_gateway_without_tools(recipe: Recipe) -> None:
    encoder = ChatEncoder(byte_tokenizer("gemma"))
    with pytest.raises(ConfigError, match=r"gateway\.tool_parser=null"):
        make_codec(recipe(AGENT), encoder)
    assert make_codec(recipe(AGENT, "gateway.tool_parser=null"), encoder).encoder is encoder


def test_an_unknown_parser_is_named(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.tool_parser.*did you mean"):
        make_codec(recipe(AGENT, "gateway.tool_parser=hermess"), ChatEncoder(byte_tokenizer("qwen3")))


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
