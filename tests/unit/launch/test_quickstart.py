"""The quickstart's model: a directory that is whole, made once, the same for a seed."""

import asyncio
import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_rl.algorithms.interrupt import Interrupt, cancel_on_termination
from nemo_rl.config.policy import TokenizerConfig
from nemo_rl.data.tokenizer import load_tokenizer
from nemo_rl.launch import models as quickstart
from nemo_rl.launch import quickstart_training
from nemo_rl.launch.models import prepare_model
from nemo_rl.quickstart.models import OnStep, Recipe, sample_spelling
from nemo_rl.quickstart.words import load_quickstart_prompts


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def made(directory: Path, recipe: Recipe, *, on_step: OnStep | None = None) -> Path:
    return asyncio.run(prepare_model(directory, recipe, on_step=on_step))


def weights_of(directory) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).state_dict()


def test_model_is_a_function_of_the_seed(tmp_path):
    before = torch.random.get_rng_state()
    one, same, other = (
        weights_of(made(tmp_path / name, Recipe(seed=seed, num_steps=2)))
        for name, seed in (("one", 3), ("same", 3), ("other", 4))
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])
    assert torch.equal(before, torch.random.get_rng_state())


def test_directory_holds_model_and_tokenizer_and_nothing_else_is_left(tmp_path):
    directory = made(tmp_path / "cache" / "model", Recipe(num_steps=1))
    assert load_tokenizer(TokenizerConfig(), str(directory)).eos_token == "<|im_end|>"
    assert [path.name for path in directory.parent.iterdir()] == ["model"]


def test_complete_directory_is_kept_and_an_unfinished_one_replaced(tmp_path):
    directory = made(tmp_path / "model", Recipe(num_steps=1))
    (directory / "note").touch()
    steps: list[int] = []
    made(directory, Recipe(num_steps=1), on_step=lambda step, *_: steps.append(step))
    assert steps == []
    assert (directory / "note").exists()

    (directory / "complete").unlink()
    made(directory, Recipe(num_steps=1), on_step=lambda step, *_: steps.append(step))
    assert steps == [1]
    assert not (directory / "note").exists()


def test_directory_of_another_recipe_is_made_again(tmp_path):
    seen: list[tuple[int, int]] = []
    for num_steps in (1, 2):
        recipe = Recipe(num_steps=num_steps)
        made(tmp_path / "m", recipe, on_step=lambda step, total, _: seen.append((step, total)))
    assert seen == [(1, 1), (1, 2), (2, 2)]


def test_interrupted_making_leaves_no_directory(tmp_path):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(tmp_path / "model", Recipe(num_steps=2), on_step=stop)
    assert list(tmp_path.iterdir()) == []


LONG = Recipe(num_steps=4_000, batch_size=1)  # half a minute


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_making_at_its_next_step_and_leaves_nothing(tmp_path, number):
    steps: list[int] = []

    def on_step(step: int, *_: object) -> None:
        steps.append(step)
        if step == 2:
            os.kill(os.getpid(), number)

    async def make() -> None:
        with cancel_on_termination():
            await prepare_model(tmp_path / "model", LONG, on_step=on_step)

    with pytest.raises((asyncio.CancelledError, KeyboardInterrupt)):
        asyncio.run(make())
    assert 2 <= len(steps) < LONG.num_steps
    assert list(tmp_path.iterdir()) == []
    assert [each.name for each in threading.enumerate() if each.name.startswith("quickstart")] == []


def test_a_stop_is_obeyed_before_the_first_step_too(tmp_path, monkeypatch):
    begun, asked = threading.Event(), threading.Event()

    class Told(Interrupt):
        def request(self) -> None:
            super().request()
            asked.set()

    def words():
        begun.set()
        asked.wait()
        return load_quickstart_prompts()

    monkeypatch.setattr(quickstart_training, "Interrupt", Told)
    monkeypatch.setattr(quickstart_training, "load_quickstart_prompts", words)
    steps: list[int] = []

    async def make() -> None:
        making = asyncio.create_task(
            prepare_model(tmp_path / "model", Recipe(num_steps=2), on_step=lambda step, *_: steps.append(step))
        )
        await asyncio.to_thread(begun.wait)
        making.cancel()
        await making

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(make())
    assert steps == []
    assert list(tmp_path.iterdir()) == []


def test_faster_process_wins(tmp_path):
    directory = made(tmp_path / "model", Recipe(num_steps=1))
    recipe = (directory / "complete").read_text()
    (directory / "note").touch()
    quickstart._move_into_place(tmp_path / "mine", directory, recipe)
    assert (directory / "note").exists()


def test_less_than_half_of_the_spellings_are_right_and_all_use_the_words_letters():
    draws = random.Random(0)
    spellings = [sample_spelling("stop", draws, right_share=0.35) for _ in range(2000)]
    assert spellings.count("pots") / 2000 == pytest.approx(0.35, abs=0.04)
    assert spellings.count("stop") / 2000 == pytest.approx((1 - 0.35) / 2, abs=0.04)
    assert {"".join(sorted(each)) for each in spellings} == {"opst"}
