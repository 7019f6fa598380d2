"""The quickstart's models before reinforcement learning, made by the recipes of recipes.py."""

import functools
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.quickstart.model import make_model
from nemo_rl.quickstart.recipes import Recipe, spellings
from nemo_rl.quickstart.tokenizer import make_pair_tokenizer, make_tokenizer
from nemo_rl.quickstart.words import quickstart_prompts
from nemo_rl.types import Message, Prompt

logger = logging.getLogger(__name__)

COMPLETE = "complete"  # a file in a folder that was written to its end: the recipe of its weights

Progress = Callable[[int, int, float], None]  # (steps done, steps in all, loss)


def prepare_model(folder: Path, recipe: Recipe, *, progress: Progress | None = None) -> Path:
    """Make `folder` a Hugging Face model with tokenizer and chat template; one that is complete is kept.

    Half a minute on two CPU cores. The folder appears whole or not at all, also when several processes make it.
    """
    marker = folder / COMPLETE
    if marker.is_file() and marker.read_text() == recipe.text:
        return folder
    logger.info("making the quickstart's model in %s: half a minute, once", folder)
    tokenizer = make_tokenizer() if recipe.tokenizer == "characters" else make_pair_tokenizer()
    model = make_model(tokenizer, recipe)
    train, _ = quickstart_prompts()
    warm_start(model, tokenizer, train.prompts, recipe, progress=progress)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch) / "model"
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        (made / COMPLETE).write_text(recipe.text)
        _put_in_place(made, folder, recipe.text)
    return folder


def warm_start(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    recipe: Recipe,
    *,
    progress: Progress | None = None,
) -> None:
    """Train on spellings of the prompts' words, `batch_size` a step; the learning rate rises, then falls."""
    num_steps, warmup = recipe.num_steps, recipe.warmup_steps
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.peak_learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warmup) * max(0.05, 1 - step / num_steps)
    )
    model.train()
    for step, (token_ids, labels) in enumerate(_batches(tokenizer, prompts, recipe), start=1):
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


def _batches(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], recipe: Recipe
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Token ids [B, T] and labels [B, T], -100 where nothing is learnt: the prompt and the padding."""
    encoder, size = ChatEncoder(tokenizer), recipe.batch_size
    (end,) = encoder.stop_token_ids

    @functools.cache
    def question(messages: tuple[Message, ...]) -> tuple[int, ...]:
        return flat_token_ids(encoder.encode_prompt(messages))

    conversations = spellings(prompts, recipe)
    for start in range(0, len(conversations), size):
        rows = []
        for conversation in conversations[start : start + size]:
            *asked, spelling = conversation.messages
            answer = tokenizer.encode(spelling.content, add_special_tokens=False)
            rows.append((question(tuple(asked)), (*answer, end)))
        width = max(len(prompt) + len(answer) for prompt, answer in rows)
        token_ids = torch.zeros((size, width), dtype=torch.int64)
        labels = torch.full((size, width), -100)
        for row, (prompt, answer) in enumerate(rows):
            length = len(prompt) + len(answer)
            token_ids[row, :length] = torch.tensor((*prompt, *answer))
            labels[row, len(prompt) : length] = torch.tensor(answer)
        yield token_ids, labels


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
