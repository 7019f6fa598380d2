"""Shared fixtures of the contract tests: engines and ranks take long to start."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from nemo_rl.generation.engines import EngineModel
from nemo_rl.generation.hf import HFGeneration
from nemo_rl.generation.vllm.engine import VllmGeneration
from nemo_rl.quickstart.models import make_model, make_tokenizer, student
from tests.contracts.engines import MAX_MODEL_LEN, save_tiny_model, section
from tests.contracts.layouts import Layouts
from tests.contracts.openai_server import MAX_LOGPROBS, SERVED_NAME, openai_server
from tests.contracts.openai_server import MAX_MODEL_LEN as SERVED_MODEL_LEN
from tests.contracts.rank_pool import RankPool
from tests.unit.policy.tiny import EXPERT_MODELS, MODELS, STACKED_MODELS, saved_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {name: saved_model(name, directory) for name in MODELS | EXPERT_MODELS | STACKED_MODELS}


@pytest.fixture(scope="package")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    running = RankPool(tmp_path_factory.mktemp("ranks"))
    yield running
    running.close()


@pytest.fixture(scope="package")
def run(pool: RankPool, models: dict[str, Path]) -> Layouts:
    return Layouts(pool, models)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """As the ranks have; several wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def engine_loop() -> Iterator[asyncio.Runner]:
    """Return the event loop that the shared engines run in."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("tiny_models")
    return {name: save_tiny_model(directory / name, tied=name == "tied") for name in ("tied", "untied")}


@pytest.fixture(scope="session")
def engines(engine_loop: asyncio.Runner, tiny_models: dict[str, Path]) -> Iterator[Any]:
    """`engines(kind, name)`: the engine of that kind with the tiny model of that name, started when first asked for."""
    started: dict[tuple[str, str], Any] = {}

    def engine(kind: str, name: str) -> Any:
        if (kind, name) not in started:
            started[kind, name] = start(engine_loop, kind, str(tiny_models[name]))
        return started[kind, name]

    yield engine
    for running in started.values():
        engine_loop.run(running.close())


def start(runner: asyncio.Runner, kind: str, model_path: str) -> Any:
    if kind == "hf":
        return HFGeneration(model_path, max_batch_size=4)
    engine = section(in_process=kind == "vllm in process")
    return runner.run(VllmGeneration.create(engine, EngineModel(model_path, "float32", MAX_MODEL_LEN, "cpu")))


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """Return the model that the server of `served_url` has, and its directory."""
    directory = tmp_path_factory.mktemp("served")
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, student(3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # log-probs far from those of a uniform distribution
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model.eval(), directory


@pytest.fixture(scope="session")
def served_url(served_model: tuple[PreTrainedModel, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a real vLLM server of OpenAI's API on first use."""
    options = {
        "--served-model-name": SERVED_NAME,
        "--dtype": "float32",
        "--max-logprobs": MAX_LOGPROBS,
        "--max-model-len": SERVED_MODEL_LEN,
        "--max-num-seqs": 8,
    }
    with openai_server(served_model[1], tmp_path_factory.mktemp("server") / "log", options) as url:
        yield url
