"""The quickstart's model before reinforcement learning: an imperfect speller that explores.

A short supervised training on labels of which less than half are right. A clean one would leave nothing to learn,
none at all nothing to reward.
"""

import functools
import logging
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.quickstart.model import make_model
from nemo_rl.quickstart.tokenizer import make_tokenizer
from nemo_rl.quickstart.words import QUICKSTART_TRAIN, QUICKSTART_VALIDATION, quickstart_prompts, words_of
from nemo_rl.types import Prompt

logger = logging.getLogger(__name__)

NUM_STEPS = 280
BATCH_SIZE = 64
PEAK_LEARNING_RATE = 2e-3
RIGHT_SHARE = 0.35  # of the labels
COMPLETE = "complete"  # a file in a folder that was written to its end: the recipe of its weights

Progress = Callable[[int, int, float], None]  # (steps done, steps in all, loss)


def prepare_model(folder: Path, *, seed: int = 0, num_steps: int = NUM_STEPS, progress: Progress | None = None) -> Path:
    """Make `folder` a Hugging Face model with tokenizer and chat template; one that is complete is kept.

    Half a minute on two CPU cores. The folder appears whole or not at all, also when several processes make it.
    """
    recipe = _recipe(seed, num_steps)
    marker = folder / COMPLETE
    if marker.is_file() and marker.read_text() == recipe:
        return folder
    logger.info("making the quickstart's model in %s: half a minute, once", folder)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed=seed)
    train, _ = quickstart_prompts()
    warm_start(model, tokenizer, train.prompts, seed=seed, num_steps=num_steps, progress=progress)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch) / "model"
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        (made / COMPLETE).write_text(recipe)
        _put_in_place(made, folder, recipe)
    return folder


def warm_start(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    seed: int,
    num_steps: int = NUM_STEPS,
    progress: Progress | None = None,
) -> None:
    """Train on noisy spellings of the prompts' words, `BATCH_SIZE` a step; the learning rate rises, then falls."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 30) * max(0.05, 1 - step / num_steps)
    )
    model.train()
    for step, (token_ids, labels) in enumerate(_batches(tokenizer, prompts, seed=seed, num_steps=num_steps), start=1):
        logits = model(input_ids=token_ids).logits[:, :-1]  # right padding: no earlier token sees it
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if progress is not None:
            progress(step, num_steps, loss.item())
    model.eval()


def noisy_spelling(word: str, draws: random.Random) -> str:
    """The word backward with probability RIGHT_SHARE; else forward, or backward with two letters swapped."""
    backward = word[::-1]
    if draws.random() < RIGHT_SHARE:
        return backward
    if draws.random() < 0.5:
        return word
    letters = list(backward)
    first, second = draws.sample(range(len(letters)), 2)
    letters[first], letters[second] = letters[second], letters[first]
    return "".join(letters)


def _batches(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], *, seed: int, num_steps: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids [B, T] and labels [B, T], -100 where nothing is learnt: the prompt and the padding."""
    encoder, draws = ChatEncoder(tokenizer), random.Random(seed)
    (end,), words = encoder.stop_token_ids, words_of(prompts)

    @functools.cache
    def question(place: int) -> tuple[int, ...]:
        return flat_token_ids(encoder.encode_prompt(prompts[place].messages))

    for _ in range(num_steps):
        rows = []
        for place in draws.choices(range(len(prompts)), k=BATCH_SIZE):
            answer = tokenizer.encode(noisy_spelling(words[place], draws), add_special_tokens=False)
            rows.append((question(place), (*answer, end)))
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        token_ids = torch.zeros((BATCH_SIZE, width), dtype=torch.int64)
        labels = torch.full((BATCH_SIZE, width), -100)
        for row, (prompt, answer) in enumerate(rows):
            length = len(prompt) + len(answer)
            token_ids[row, :length] = torch.tensor((*prompt, *answer))
            labels[row, len(prompt) : length] = torch.tensor(answer)
        yield token_ids, labels


def _recipe(seed: int, num_steps: int) -> str:
    """Everything that the weights depend on; a folder of another recipe is made anew."""
    training = f"seed {seed}, {num_steps} steps, batch {BATCH_SIZE}, rate {PEAK_LEARNING_RATE}, right {RIGHT_SHARE}"
    words = (section.model_dump_json(exclude_unset=True) for section in (QUICKSTART_TRAIN, QUICKSTART_VALIDATION))
    return "\n".join((training, *words, ""))


def _put_in_place(made: Path, folder: Path, recipe: str) -> None:
    """Rename, replacing a folder of another recipe; where another process was faster, its folder stays."""
    if folder.exists() and (folder / COMPLETE).is_file() and (folder / COMPLETE).read_text() == recipe:
        return
    if folder.exists():
        shutil.rmtree(folder)
    try:
        os.rename(made, folder)
    except OSError:
        if not (folder / COMPLETE).is_file():
            raise
