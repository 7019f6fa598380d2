"""`nemo-rl serve` and `chat` on real vLLM: answers are those of transformers and peft."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl.distributed.machine import unused_port
from tests.openai_suite import run_suite
from tests.trained_runs import write_lora_run, write_run

QUESTIONS = [f"Spell this word backward (example: sun -> nus): {word}" for word in ("lamp", "tree", "mouse")]
START_S = 240.0
NEMO_RL = [sys.executable, "-m", "nemo_rl"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "exp_001", {2: 0.5, 4: 0.25})


def greedy_answers(weights: Path, adapter: Path | None = None) -> list[str]:
    """Return the answers of transformers, and of peft with an adapter."""
    tokenizer, model = AutoTokenizer.from_pretrained(weights), AutoModelForCausalLM.from_pretrained(weights)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter)).eval()
    answers = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            ids = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
                **encoded, do_sample=False, max_new_tokens=8
            )[0, encoded["input_ids"].shape[1] :]
        answers.append(tokenizer.decode(ids, skip_special_tokens=True))
    return answers


@pytest.mark.slow  # a whole run first; test_adapters.py samples adapters by name
def test_a_run_of_lora_serves_its_base_and_each_adapter_by_name(tmp_path: Path) -> None:
    run = write_lora_run(tmp_path / "exp_001", {2: 0.5, 4: 0.25})
    names = {"base": None} | {f"exp_001-step_{n}": run / f"checkpoints/step_{n}/policy/adapter" for n in (2, 4)}
    port, log = unused_port(), tmp_path / "server.log"
    with log.open("w") as output:
        words = [*NEMO_RL, "serve", str(run), "--port", str(port), "--", "--seed", "1"]
        server = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        assert wait_for_model(client, server, log) == "base"
        assert [model.id for model in client.models.list().data] == [*names]
        said = {}
        for name, adapter in names.items():
            said[name] = greedy_answers(tmp_path / "base", adapter)
            for question, answer in zip(QUESTIONS, said[name], strict=True):
                reply = client.chat.completions.create(
                    model=name, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=8
                )
                assert reply.choices[0].message.content == answer, name
        assert len({tuple(answers) for answers in said.values()}) == len(names)
        with pytest.raises(openai.NotFoundError, match="`exp_001` does not exist; known: base, exp_001-step_2, exp_"):
            client.chat.completions.create(model="exp_001", messages=[{"role": "user", "content": "hi"}])
        asyncio.run(run_async_suite(port, "exp_001-step_2"))
    finally:
        server.terminate()
        server.wait(60)


async def run_async_suite(port: int, name: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        await run_suite(client, name, QUESTIONS[0])


@pytest.mark.slow  # another start of the server
def test_a_chat_answers_the_lines_of_its_input(run: Path) -> None:
    expected = greedy_answers(run / "checkpoints" / "step_2" / "policy" / "weights")
    lines = "\n/reset\n".join(QUESTIONS) + "\n"
    done = subprocess.run(
        [*NEMO_RL, "chat", str(run), "--temperature", "0"],
        input=lines,
        capture_output=True,
        text=True,
        check=False,
        timeout=START_S,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "\n".join(expected) + "\n"


def wait_for_model(client: openai.OpenAI, server: "subprocess.Popen[bytes]", log: Path) -> str:
    ends_at = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < ends_at:
        try:
            return client.models.list().data[0].id
        except openai.APIConnectionError:
            time.sleep(0.2)
    raise AssertionError(f"the server is not up: {log.read_text()[-2000:]}")
