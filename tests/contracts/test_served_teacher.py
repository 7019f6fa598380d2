"""A teacher behind a real vLLM server: log-probs and the most likely tokens are those of Hugging Face in float32."""

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from transformers import LlamaForCausalLM

from nemo_rl.config.endpoint import EndpointLimits, ServedModel
from nemo_rl.errors import ConfigError
from nemo_rl.generation.vllm_start import environment
from nemo_rl.policy.served_teacher import ServedTeacher
from nemo_rl.quickstart.model import make_model
from nemo_rl.quickstart.recipes import student
from nemo_rl.quickstart.tokenizer import make_tokenizer

START_S = 240.0
K, MAX_LOGPROBS, MAX_MODEL_LEN = 5, 8, 65
LENGTHS = (64, 17, 2, 40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Path]:
    folder = tmp_path_factory.mktemp("teacher")
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, student(3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # log-probs far from those of a uniform distribution
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval(), folder


@pytest.fixture(scope="module")
def url(model: tuple[LlamaForCausalLM, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {
        "--model": model[1],
        "--served-model-name": "teacher",
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": "float32",
        "--max-logprobs": MAX_LOGPROBS,
        "--max-model-len": MAX_MODEL_LEN,
        "--max-num-seqs": 8,
        "--kv-cache-memory-bytes": 2**25,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, *(str(word) for option in options.items() for word in option)],
            env={**os.environ, **environment("cpu")},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until_up(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def wait_until_up(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    ends_at = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < ends_at:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError(f"the server is not up: {log.read_text()[-2000:]}")


def make_batch() -> TensorDict:
    torch.manual_seed(0)
    token_ids = torch.randint(4, 110, (len(LENGTHS), max(LENGTHS)))
    at, lengths = torch.arange(max(LENGTHS))[None], torch.tensor(LENGTHS)
    mask = ((at >= lengths[:, None] // 2) & (at < lengths[:, None])).float()
    return TensorDict(
        {"token_ids": token_ids * (at < lengths[:, None]), "token_mask": mask, "lengths": lengths},
        batch_size=[len(LENGTHS)],
    )


def asked(url: str, call: Any) -> Any:
    async def main() -> Any:
        section = ServedModel(base_urls=[url], model="teacher", limits=EndpointLimits(request_timeout_s=120.0))
        teacher = ServedTeacher("teacher", section)
        try:
            return await call(teacher)
        finally:
            await teacher.close()

    return asyncio.run(main())


def test_log_probs_are_those_of_hugging_face(model, url):
    batch = make_batch()
    logprobs = asked(url, lambda teacher: teacher.logprobs(batch))
    exact = distributions(model[0], batch).gather(-1, batch["token_ids"][..., None])[..., 0]
    torch.testing.assert_close(logprobs, exact * batch["token_mask"], atol=1e-4, rtol=0)


def test_the_most_likely_tokens_are_those_of_hugging_face(model, url):
    batch = make_batch()
    ids, logprobs = asked(url, lambda teacher: teacher.topk_logprobs(batch, K))
    exact = distributions(model[0], batch)
    is_asked = batch["token_mask"] > 0
    torch.testing.assert_close(logprobs[is_asked], exact.topk(K).values[is_asked], atol=1e-4, rtol=0)
    torch.testing.assert_close(logprobs[is_asked], exact.gather(-1, ids)[is_asked], atol=1e-4, rtol=0)
    assert not logprobs[~is_asked].any()


def test_a_k_above_the_servers_limit_is_told_before_anything_starts(url):
    asked(url, lambda teacher: teacher.check(MAX_LOGPROBS))
    with pytest.raises(ConfigError, match=r"--max-logprobs"):
        asked(url, lambda teacher: teacher.check(MAX_LOGPROBS + 1))


@torch.no_grad()
def distributions(model: LlamaForCausalLM, batch: TensorDict) -> torch.Tensor:
    """[B, T, V]: entry t is the distribution before token t."""
    logprobs = model(batch["token_ids"]).logits.log_softmax(-1)
    return torch.cat([torch.zeros_like(logprobs[:, :1]), logprobs[:, :-1]], dim=1)
