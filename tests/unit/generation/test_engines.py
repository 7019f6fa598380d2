import asyncio
from typing import Any

import pytest

from nemo_rl.config.loading import load_config
from nemo_rl.config.policy import GenerationConfig
from nemo_rl.config.registries import ENGINES
from nemo_rl.errors import ConfigError, GenerationError
from nemo_rl.generation.driver_engines import CustomEngineConfig
from nemo_rl.generation.engines import EngineModel, make_generation
from nemo_rl.recipes import find_recipe
from tests.fakes.generation import FakeGeneration

MODEL = EngineModel("m", "float32", 64, "cpu")
HERE = "tests.unit.generation.test_engines"


class PlainEngine(FakeGeneration):
    def __init__(self, vocab_size: int, *, max_model_len: int) -> None:
        super().__init__(vocab_size=vocab_size)
        self.max_model_len = max_model_len


async def open_engine(**arguments: Any) -> FakeGeneration:
    engine = FakeGeneration(vocab_size=arguments.pop("vocab_size"))
    engine.calls = sorted(arguments)
    return engine


async def never_starts() -> FakeGeneration:
    await asyncio.Event().wait()
    raise AssertionError


def section(name: str, **kwargs: Any) -> GenerationConfig:
    read: GenerationConfig = ENGINES.read({"backend": f"{HERE}:{name}", "kwargs": kwargs})
    return read


def test_class_of_a_user_is_made_with_its_kwargs_and_what_it_declares_of_the_model():
    engine = asyncio.run(make_generation(section("PlainEngine", vocab_size=9), MODEL))
    assert isinstance(engine, PlainEngine)
    assert (engine.vocab_size, engine.max_model_len) == (9, 64)


def test_async_function_of_a_user_may_take_all_of_the_model():
    engine = asyncio.run(make_generation(section("open_engine", vocab_size=9), MODEL))
    assert isinstance(engine, FakeGeneration)
    names = ["device", "dtype", "max_model_len", "model_path", "records_routes", "trust_remote_code", "vision_type"]
    assert engine.calls == names


def test_an_engine_that_never_starts_is_given_up_on_and_its_limit_named():
    with pytest.raises(
        GenerationError, match=r"never_starts did not start within 0\.05 s \(cluster\.start_timeout_s\)"
    ):
        asyncio.run(make_generation(section("never_starts"), MODEL, start_timeout_s=0.05))


def test_kwargs_that_a_users_engine_does_not_take_are_refused():
    with pytest.raises(
        ConfigError, match=r"generation\.kwargs.*PlainEngine: missing a required argument: 'vocab_size'"
    ):
        asyncio.run(make_generation(section("PlainEngine", vocab=9), MODEL))


def grpo(*overrides: str) -> Any:
    return load_config(find_recipe("quickstart"), overrides)


def test_recipe_written_for_vllm_takes_a_users_engine_by_its_dotted_path_alone():
    generation = grpo(f"policy.generation.backend={HERE}:PlainEngine").policy.generation
    assert isinstance(generation, CustomEngineConfig)
    assert generation.runs_in_driver
    assert not generation.can_sleep


@pytest.mark.parametrize(
    ("overrides", "key", "text"),
    [
        (["policy.generation.backend=vlm"], "policy.generation.backend", "did you mean vllm"),
        ([f"policy.generation.backend={HERE}:MODEL"], "policy.generation.backend", "must be a class"),
        ([f"policy.generation.backend={HERE}:nothing"], "policy.generation.backend", "has no 'nothing'"),
        (
            [f"policy.generation.backend={HERE}:PlainEngine", "++policy.generation.num_replicas=2"],
            "policy.generation.num_replicas",
            "one engine",
        ),
        (
            [f"policy.generation.backend={HERE}:PlainEngine", "++policy.generation.in_actor=true"],
            "policy.generation.in_actor",
            "beside the trainer",
        ),
    ],
)
def test_engine_that_cannot_run_is_refused(overrides: list[str], key: str, text: str):
    with pytest.raises(ConfigError, match=text) as caught:
        grpo(*overrides, "policy.device=cpu")
    assert caught.value.key == key
