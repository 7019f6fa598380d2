"""What vLLM's server is told to serve, and what its answers to unknown models say; a real server:
tests/contracts/test_served_run.py."""

import asyncio
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Qwen3MoeConfig

from nemo_rl.checkpoint import write_manifest
from nemo_rl.errors import CheckpointError, ConfigError
from nemo_rl.generation.vllm.model_names import ModelNames
from nemo_rl.launch.trained_model import find_trained_model
from nemo_rl.trained.serve_command import served_adapters, server_command
from tests.trained_runs import write_lora_run


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lora_run(tmp_path_factory.mktemp("runs") / "exp_001", {3: 0.5, 12: 0.25})


def words_after(command: list[str], option: str, count: int = 1) -> list[str]:
    at = command.index(option) + 1
    return command[at : at + count]


def test_a_run_of_lora_is_its_base_and_the_adapters_of_all_checkpoints(lora_run: Path) -> None:
    trained = find_trained_model(lora_run)
    adapters = served_adapters(trained, is_whole_run=True)
    assert list(adapters) == ["exp_001-step_3", "exp_001-step_12"]
    assert list(served_adapters(trained, is_whole_run=False)) == ["exp_001-step_3"]
    command = server_command(trained, host="h", port=1, adapters=adapters, options=["--seed", "1"])
    assert words_after(command, "--model") == [str(lora_run.parent / "base")]
    assert words_after(command, "--served-model-name") == ["base"]
    assert [words_after(command, option) for option in ("--max-lora-rank", "--max-loras")] == [["8"], ["2"]]
    modules = [json.loads(word) for word in words_after(command, "--lora-modules", 2)]
    assert modules == [{"name": name, "path": str(path)} for name, path in adapters.items()]


def test_a_checkpoint_of_an_adapter_alone_has_no_merged_weights(lora_run: Path) -> None:
    trained = find_trained_model(lora_run)
    assert "exp_001-step_3" in words_after(server_command(trained, host="h", port=1), "--lora-modules")[0]
    with pytest.raises(CheckpointError, match="adapters alone"):
        server_command(trained, host="h", port=1, adapters={})


def test_adapters_of_a_mixture_are_not_served_alone(lora_run: Path, tmp_path: Path) -> None:
    Qwen3MoeConfig().save_pretrained(tmp_path / "experts")
    step = Path(shutil.copytree(lora_run / "checkpoints" / "step_3", tmp_path / "step_3"))
    config = (step / "config.yaml").read_text()
    (step / "config.yaml").write_text(config.replace(str(lora_run.parent / "base"), str(tmp_path / "experts")))
    write_manifest(step, 3)
    with pytest.raises(ConfigError, match="experts of this 'qwen3_moe' model too; allowed: --merged"):
        served_adapters(find_trained_model(step), is_whole_run=False)


def sent_by(status: int, body: bytes) -> list[Any]:
    """Return what a client is sent where vLLM's server answers in two parts."""
    models = SimpleNamespace(base_model_paths=[SimpleNamespace(name="base")], lora_requests={"one": 1, "two": 2})
    app_with_models = SimpleNamespace(state=SimpleNamespace(openai_serving_models=models))
    sent: list[Any] = []

    async def server(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body[:5], "more_body": True})
        await send({"type": "http.response.body", "body": body[5:]})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {}

    asyncio.run(ModelNames(server)({"type": "http", "app": app_with_models}, receive, send))
    return sent


def test_an_unknown_model_is_answered_with_the_names_that_exist() -> None:
    said = "The model `x` does not exist. Valid aliases: base."
    start, body = sent_by(404, json.dumps({"error": {"message": said, "param": "model", "code": 404}}).encode())
    answer = json.loads(body["body"])
    assert answer["error"]["message"] == "The model `x` does not exist; known: base, one, two"
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()


@pytest.mark.parametrize(
    ("status", "body"), [(404, b'{"detail":"Not Found"}'), (404, b"not JSON"), (200, b'{"error": {"message": "ok"}}')]
)
def test_other_answers_are_left_as_they_are(status: int, body: bytes) -> None:
    start, *parts = sent_by(status, body)
    assert start["status"] == status
    assert b"".join(part["body"] for part in parts) == body
