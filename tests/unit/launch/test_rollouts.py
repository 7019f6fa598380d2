import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from nemo_rl.config.master import GRPORunConfig
from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.data.prompt_sets import PromptSet
from nemo_rl.distributed.machine import unused_port
from nemo_rl.environments.registry import make_environment
from nemo_rl.errors import ConfigError
from nemo_rl.experience.command_agent import CommandAgent
from nemo_rl.experience.filtered_source import FilteredSource
from nemo_rl.experience.function_agent import FunctionAgent
from nemo_rl.experience.rollout_dependencies import RolloutDependencies, RolloutOptions
from nemo_rl.experience.rollouts import run_multi_turn_rollout_async_generation
from nemo_rl.experience.sync_source import SyncSource
from nemo_rl.experience.turns import RolloutJob
from nemo_rl.launch.agent_layer import make_agents, make_codec
from nemo_rl.launch.resolved_run import ResolvedRun, resolve_run
from nemo_rl.launch.sampling import make_limits, make_sampling
from nemo_rl.launch.training import run_training
from nemo_rl.launch.training_source import make_source, make_validator
from nemo_rl.types import Message, Prompt, StopReason
from tests.fakes.encoder import END, FakeEncoder
from tests.fakes.environments import FakeEnvironment
from tests.fakes.generation import FakeGeneration
from tests.fakes.gym_stack import FakeGymStack, row_of, spell_and_play
from tests.templates import byte_tokenizer
from tests.unit.algorithms.run_setup import HELD_OUT, TRAINED, VOCAB_SIZE, make_config, make_resolved_run, prompts
from tests.unit.experience.rollout_setup import check_environment
from tests.unit.launch.conftest import MAX_LENGTH, Recipe


def resolved(config: GRPORunConfig) -> ResolvedRun:
    return asyncio.run(resolve_run(config))


def test_inputs_are_prompts_their_encoder_and_probes_of_the_first_prompts(recipe: Recipe) -> None:
    run = resolved(recipe("weight_sync.num_probe_prompts=2"))
    assert [p.messages[0].content for p in run.train.prompts] == list("abcdef")
    assert {p.task_name for p in run.train.prompts} == {"letters"}
    assert run.validation == ()
    assert tuple(probe.token_ids for probe in run.probes) == tuple(
        flat_token_ids(run.policy.encoder.encode_prompt(p.messages)) for p in run.train.prompts[:2]
    )
    assert str(run.policy.tokenizer.decode(list(run.probes[0].token_ids))).endswith("<|im_start|>assistant\n")


def test_a_task_without_an_environment_names_entry_and_data_set(recipe: Recipe) -> None:
    config = recipe("~env.letters", "data.train.env_name=null", "++env.letter={type: math}")
    with pytest.raises(ConfigError, match=r"env\.math = None: needed by the dataset 'train'; known: letter"):
        resolved(config)


def test_a_validation_sets_task_needs_its_environment_too(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"input": "z", "output": "z"}) + "\n")
    config = recipe(f"++data.validation={{dataset_name: jsonl, data_path: {tmp_path / 'held_out.jsonl'}, name: held}}")
    with pytest.raises(ConfigError, match=r"env\.math = None: needed by the dataset 'held'; known: letters"):
        resolved(config)


def test_a_prompt_needs_room_for_one_sampled_token(recipe: Recipe) -> None:
    run = resolved(recipe())
    longest = max(len(flat_token_ids(run.policy.encoder.encode_prompt(p.messages))) for p in run.train.prompts)
    small = "policy.generation.max_new_tokens=1"
    resolved(recipe(small, f"policy.max_total_sequence_length={longest + 1}"))
    with pytest.raises(ConfigError, match=rf"data\.max_input_seq_length = {longest - 1}.*has {longest} tokens"):
        resolved(recipe(small, f"policy.max_total_sequence_length={longest}"))
    assert longest < MAX_LENGTH


def test_max_input_seq_length_limits_prompts_further(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"data\.max_input_seq_length = 3"):
        resolved(recipe("data.max_input_seq_length=3"))


def test_one_prompt_that_is_too_long_ends_a_run_only_if_it_is_to_be_refused(recipe: Recipe, tmp_path: Path) -> None:
    rows = [{"input": text, "output": text.upper()} for text in ("a" * 30, "b", "c")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    held = f"++data.validation={{dataset_name: jsonl, data_path: {path}, name: held, env_name: letters}}"
    words = (f"data.train.data_path={path}", held, "++data.disjoint=false", "weight_sync.num_probe_prompts=1")
    run = resolved(recipe(*words))
    assert run.overlong_measured == {"held": 1}
    assert "user\nb<" in str(run.policy.tokenizer.decode(list(run.probes[0].token_ids)))
    with pytest.raises(ConfigError, match=r"data\.max_input_seq_length = 31: prompt \w+ of 'jsonl' has \d+ tokens"):
        resolved(recipe(*words, "++data.overlong=refuse"))


def test_sequences_longer_than_the_model_takes_are_refused(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"policy\.max_total_sequence_length = 100000: the model takes \d+ tokens"):
        resolved(recipe("policy.max_total_sequence_length=100000"))


VALIDATION = (PromptSet("held_out", prompts(2, HELD_OUT)),)


def fake_run(config: GRPORunConfig) -> ResolvedRun:
    return make_resolved_run(config, PromptSet("train", prompts(4)), *VALIDATION)


def dependencies(config: GRPORunConfig, generation: FakeGeneration | None = None) -> RolloutDependencies:
    generation = generation or FakeGeneration(vocab_size=VOCAB_SIZE)
    environments = {name: check_environment(FakeEnvironment()) for name in (TRAINED, HELD_OUT)}
    return RolloutDependencies(generation, environments, FakeEncoder(), make_limits(config))


# ---- sampling


def test_sampling_stops_at_the_tokenizers_ends_and_at_those_configured_each_once() -> None:
    config = make_config(policy={"generation": {"stop_token_ids": [9, 2, 9], "stop_strings": ["</a>"]}})
    sampling = make_sampling(config, (2, 5))
    assert sampling.stop_token_ids == (2, 5, 9)
    assert sampling.stop_strings == ("</a>",)


def test_ignore_eos_leaves_no_stop_token() -> None:
    config = make_config(policy={"generation": {"ignore_eos": True, "stop_token_ids": [9]}})
    assert make_sampling(config, (2,)).stop_token_ids == ()


def test_sampling_without_top_k_is_not_cut() -> None:
    sampling = make_sampling(make_config(policy={"generation": {"temperature": 0.7}}), ())
    assert (sampling.top_k, sampling.top_p, sampling.temperature) == (-1, 1.0, 0.7)
    assert make_sampling(make_config(policy={"generation": {"top_k": 4}}), ()).top_k == 4


@pytest.mark.parametrize(("max_new_tokens", "expected"), [(8, 8), (None, 64)])
def test_a_response_without_a_limit_is_bounded_by_the_sequence(max_new_tokens: int | None, expected: int) -> None:
    config = make_config(policy={"generation": {"max_new_tokens": max_new_tokens}})
    assert make_sampling(config, ()).max_new_tokens == expected


def test_request_that_queues_behind_steps_collected_ahead_has_a_deadline_for_each_of_them() -> None:
    ahead = {"async_grpo": {"enabled": True, "max_trajectory_age_steps": 2}}
    config = make_config(grpo=ahead, policy={"generation": {"timeout_s": 11.0}})
    assert make_limits(config).generation_timeout_s == 33.0


def test_limits_and_seed_are_those_of_the_configuration() -> None:
    config = make_config(
        grpo={"max_rollout_turns": 3, "seed": 5},
        rollout={"max_retries": 4, "stall_timeout_s": 9.0, "retry_backoff_s": 0.25},
        policy={"generation": {"timeout_s": 11.0}},
    )
    limits = make_limits(config)
    assert (limits.max_turns, limits.max_total_length, limits.max_retries) == (3, 64, 4)
    assert (limits.stall_timeout_s, limits.retry_backoff_s, limits.generation_timeout_s) == (9.0, 0.25, 11.0)
    assert make_limits(config, max_retries=0).max_retries == 0
    validator = make_validator(config, VALIDATION, dependencies(config))
    assert validator is not None
    assert (validator.seed, validator.sampling.stop_token_ids) == (5, (END,))


# ---- the source


def drawn(config: GRPORunConfig) -> list[int]:
    """Requests of the first step, and prompts drawn for it."""
    generation = FakeGeneration(vocab_size=VOCAB_SIZE)
    source = make_source(fake_run(config), dependencies(config, generation))
    asyncio.run(source.next_groups(0))
    return [len(generation.requests), source.state_dict()["consumed_prompts"]]


def test_training_draws_a_steps_prompts_with_all_their_generations() -> None:
    config = make_config()
    assert isinstance(make_source(fake_run(config), dependencies(config)), SyncSource)
    assert drawn(config) == [6, 2]


def test_dynamic_sampling_filters_and_draws_more_at_once() -> None:
    config = make_config(
        grpo={"use_dynamic_sampling": True, "batch_multiplier": 1.5, "dynamic_sampling_max_gen_batches": 1}
    )
    assert isinstance(make_source(fake_run(config), dependencies(config)), FilteredSource)
    assert drawn(config) == [9, 3]


def order(*, shuffle: bool, seed: int) -> list[str]:
    """Prompts of an epoch."""
    config = make_config(data={"shuffle": shuffle}, grpo={"num_prompts_per_step": 4, "seed": seed})
    source = make_source(fake_run(config), dependencies(config))
    return [group.prompt.prompt_id for group in asyncio.run(source.next_groups(0)).groups]


def test_prompts_come_in_their_order_or_in_that_of_the_seed() -> None:
    in_order = [f"{TRAINED}{i}" for i in range(4)]
    assert order(shuffle=False, seed=1) == in_order
    shuffled = [order(shuffle=True, seed=seed) for seed in range(4)]
    assert all(sorted(one) == in_order for one in shuffled)
    assert len({tuple(one) for one in shuffled}) > 1
    assert order(shuffle=True, seed=2) == shuffled[2]


# ---- the validator


def test_without_validation_sets_there_is_no_validator() -> None:
    config = make_config()
    assert make_validator(config, (), dependencies(config)) is None


@pytest.mark.parametrize(("val_temperature", "expected"), [(None, 0.7), (0.0, 0.0), (0.2, 0.2)])
def test_validation_samples_at_its_own_temperature_else_at_trainings(
    val_temperature: float | None, expected: float
) -> None:
    config = make_config(grpo={"val_temperature": val_temperature}, policy={"generation": {"temperature": 0.7}})
    validator = make_validator(config, VALIDATION, dependencies(config))
    assert validator is not None
    assert validator.sampling.temperature == expected


def test_the_validator_has_the_sizes_of_the_configuration() -> None:
    sizes = {"val_num_generations_per_prompt": 4, "val_batch_size": 5, "max_val_samples": None, "val_greedy": True}
    config = make_config(grpo=sizes)
    validator = make_validator(config, VALIDATION, dependencies(config))
    assert validator is not None
    assert (validator.num_generations_per_prompt, validator.batch_size) == (4, 5)
    assert (validator.max_samples, validator.greedy) == (None, True)
    assert [prompt_set.name for prompt_set in validator.prompt_sets] == ["held_out"]


def test_a_function_that_hangs_fails_its_item_alone_and_those_that_wait_for_a_thread_are_scored() -> None:
    """20 items, 16 threads, one item that never ends: the deadline is that of each item from its start."""
    config = make_config(env={"f": {"type": "tests.unit.environments.custom:waits", "timeout_s": 5.0}})

    async def main() -> list[StopReason]:
        environment = make_environment("f", config.env["f"])
        states = [{"wait": i == 3} for i in range(20)]
        jobs = [
            RolloutJob(Prompt(f"p{i}", "f", (Message("user", "q"),), env_state=state), f"p{i}", 0)
            for i, state in enumerate(states)
        ]
        generation = FakeGeneration(vocab_size=VOCAB_SIZE)
        setup = RolloutDependencies(generation, {"f": environment}, FakeEncoder(), make_limits(config))
        options = RolloutOptions(make_sampling(config, ()), config.seed)
        trajectories = await run_multi_turn_rollout_async_generation(jobs, setup, options)
        await environment.close()
        return [t.stop_reason for t in trajectories]

    reasons = asyncio.run(main())
    assert [i for i, reason in enumerate(reasons) if reason is StopReason.FAILED] == [3]


AGENT = "++env.asker={type: agent, function: 'tests.unit.launch.test_rollouts:ask', scored_by: letters}"


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
        ("tests.unit.launch.test_rollouts:aks", "did you mean ask"),
        ("tests.unit.launch.test_rollouts:AGENT", "not a function"),
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


def train(recipe: Recipe, directory: Path, rows: Sequence[Any], *overrides: str) -> FakeGymStack:
    """Train on rows of a stack with the agents "spell" and "play"; the stack, which has ended."""
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    async def main() -> FakeGymStack:
        port = unused_port()
        stack = spell_and_play(port)
        async with stack:
            config = recipe(
                f"++env.gym={{type: nemo_gym, head_url: '{stack.head_url}', start_timeout_s: 60}}",
                f"data.train={{dataset_name: nemo_gym, data_path: {directory / 'rows.jsonl'}, env_name: gym}}",
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
