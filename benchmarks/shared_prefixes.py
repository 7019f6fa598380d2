"""Gain of shared prefixes: tokens that a training step computes, and its time, against the same samples whole.

- "quickstart": 32 prompts of its data set, 8 spellings each as its model draws them, its model's shape with random
  weights, its loss and its optimizer: the training phase of one step, whole in one padded micro-batch as the recipe has
  it, packed, and sharing prefixes.
- "agents": 2 prompts of 2 rollouts with 20 turns each, of an agent that drops its reasoning from its history: each turn
  is a sample of its own, which shares its history with the next up to the reasoning.

Each round takes the ways in turn; ratios are medians over rounds of the same round's times.

    uv run benchmarks/shared_prefixes.py
    uv run benchmarks/shared_prefixes.py --rounds 0    only tokens
"""

import argparse
import copy
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from transformers import LlamaForCausalLM

from nemo_rl.config.registries import LOSSES
from nemo_rl.losses.make import make_loss
from nemo_rl.policy.fsdp2.worker import FSDP2Trainer
from nemo_rl.policy.logprobs import CausalLogprobs
from nemo_rl.policy.micro_batches import MicroBatching, PackedTokens, PackedTrees, SampleCount
from nemo_rl.policy.prefix_tree import TreeSizes
from nemo_rl.policy.tree_logprobs import SharedPrefixLogprobs
from nemo_rl.quickstart.models import make_model, make_tokenizer, sample_spelling, student
from nemo_rl.quickstart.words import extract_words, load_quickstart_prompts

SPEED_BAR, TOKENS_BAR = 2.0, 5.0
NUM_PROMPTS, NUM_GENERATIONS = 32, 8  # of the quickstart
NUM_TURNS = 20
ALGORITHM = "modified_first_fit_decreasing"


@dataclass(frozen=True)
class Sample:
    """One sequence of a step."""

    group: int
    token_ids: tuple[int, ...]
    mask: tuple[int, ...]  # 1 where the policy sampled the token


def quickstart_samples(seed: int = 0) -> list[Sample]:
    tokenizer, draw = make_tokenizer(), random.Random(seed)
    train = load_quickstart_prompts()[0].prompts
    prompts = [train[index] for index in random.Random(seed).sample(range(len(train)), NUM_PROMPTS)]
    samples = []
    for group, (prompt, word) in enumerate(zip(prompts, extract_words(prompts), strict=True)):
        messages = [{"role": m.role, "content": m.content} for m in prompt.messages]
        encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        context = tuple(encoded)
        for _ in range(NUM_GENERATIONS):
            spelling = sample_spelling(word, draw, right_share=student(0).right_share)
            answer = (*tokenizer.encode(spelling, add_special_tokens=False), tokenizer.eos_token_id)
            samples.append(Sample(group, context + answer, (0,) * len(context) + (1,) * len(answer)))
    return samples


def agent_samples(vocabulary: int, num_prompts: int = 2, num_rollouts: int = 2, seed: int = 0) -> list[Sample]:
    draw = random.Random(seed)

    def tokens(fewest: int, most: int) -> list[int]:
        return [draw.randrange(3, vocabulary) for _ in range(draw.randint(fewest, most))]

    system, samples = tokens(120, 120), []
    for group in range(num_prompts):
        prompt = system + tokens(20, 60)
        for _ in range(num_rollouts):
            history = list(prompt)
            for _turn in range(NUM_TURNS):
                reasoning, action = tokens(4, 16), tokens(8, 24)
                sampled = reasoning + action
                samples.append(Sample(group, (*history, *sampled), (0,) * len(history) + (1,) * len(sampled)))
                history += action  # without its reasoning
                history += tokens(10, 40)
    return samples


def batch_of(samples: Sequence[Sample]) -> TensorDict:
    generator = torch.Generator().manual_seed(0)
    shape = (len(samples), max(len(s.token_ids) for s in samples))
    token_ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    for row, sample in enumerate(samples):
        token_ids[row, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
        mask[row, : len(sample.mask)] = torch.tensor(sample.mask, dtype=torch.float32)
    rows = torch.arange(len(samples))
    advantages = torch.randn(len(samples), 1, generator=generator).expand(shape) * mask
    return TensorDict(
        {
            "token_ids": token_ids,
            "token_mask": mask,
            "lengths": torch.tensor([len(s.token_ids) for s in samples]),
            "sample_mask": torch.ones(len(samples)),
            "trajectory_id": rows,
            "trajectory_tokens": mask.sum(-1),
            "group_id": torch.tensor([s.group for s in samples]),
            "reward": torch.zeros(len(samples)),
            "generation_logprobs": -torch.ones(shape) * mask,
            "prev_logprobs": -torch.ones(shape) * mask,
            "advantages": advantages,
        },
        batch_size=[len(samples)],
    )


def make_trainer(model: LlamaForCausalLM, batching: MicroBatching) -> FSDP2Trainer:
    model, options = copy.deepcopy(model), {"temperature": 1.0, "chunk_size": 1024}
    if isinstance(batching, PackedTrees):
        module = SharedPrefixLogprobs(model, packing_key="packing", sharing_key="sharing", **options)
    else:
        packing_key = "packing" if isinstance(batching, PackedTokens) else None
        module = CausalLogprobs(model, packing_key=packing_key, **options)
    return FSDP2Trainer(
        module=module,
        device=torch.device("cpu"),
        optimizer=torch.optim.AdamW(module.parameters(), lr=1e-6, weight_decay=0.0, betas=(0.9, 0.95), fused=True),
        batching=batching,
        max_grad_norm=1.0,
    )


def distinct_tokens(batch: TensorDict, part: Sequence[int]) -> int:
    own = batch[torch.tensor(part)]
    return TreeSizes(own["token_ids"].numpy(), own["lengths"].tolist()).tokens(np.arange(len(part)))


def computed_tokens(batch: TensorDict, batching: MicroBatching) -> int:
    """Return the tokens that the model computes in one step."""
    lengths = batch["lengths"].tolist()
    if isinstance(batching, PackedTrees):
        return sum(distinct_tokens(batch, part) for part in batching.parts_of(batch, 1)[0])
    if isinstance(batching, PackedTokens):
        return sum(lengths)
    return sum(len(part) * max(lengths[i] for i in part) for part in batching.parts(lengths, 1)[0])


def measure(
    batch: TensorDict, ways: dict[str, MicroBatching], model: LlamaForCausalLM, rounds: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the seconds of each step and the first step's loss, by way."""
    trainers = {way: make_trainer(model, batching) for way, batching in ways.items()}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    losses: dict[str, float] = {}
    loss_fn, order = make_loss(LOSSES.read({})), torch.arange(len(batch))
    for index in range(rounds + 2 if rounds else 0):  # the first two warm up
        for way, trainer in trainers.items():
            started = time.perf_counter()
            losses.setdefault(way, trainer.optimizer_step(batch, order, loss_fn).metrics["loss"])
            if index > 1:
                seconds[way].append(time.perf_counter() - started)
    return seconds, losses


def rows(name: str, samples: Sequence[Sample], model: LlamaForCausalLM, budget: int, size: int, rounds: int) -> None:
    batch = batch_of(samples)
    ways: dict[str, MicroBatching] = {
        "padded": SampleCount(size),
        "packed": PackedTokens(budget, "tokens", ALGORITHM),
        "sharing prefixes": PackedTrees(budget, "tokens", ALGORITHM),
    }
    seconds, losses = measure(batch, ways, model, rounds)
    total = int(batch["lengths"].sum())
    for way, batching in ways.items():
        computed, is_last = computed_tokens(batch, batching), way == "sharing prefixes"
        tokens_bar = f" [{TOKENS_BAR}]" if is_last and name == "agents" else ""
        speed_bar = f" [{SPEED_BAR}]" if is_last and name == "quickstart" else ""
        times = "- | - | -"
        if rounds:
            ratio = statistics.median(a / b for a, b in zip(seconds["padded"], seconds[way], strict=True))
            times = f"{statistics.median(seconds[way]) * 1e3:.1f} | {ratio:.2f}{speed_bar} | {losses[way]:.6f}"
        shown = f"{len(batch)} | {total} | {computed} | {total / computed:.2f}{tokens_bar} | {times}"
        print(f"| {name} | {way} | {shown} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    quickstart = make_model(tokenizer, student(0))
    long_config = copy.deepcopy(quickstart.config)
    long_config.max_position_embeddings = 4096
    print("| work | way | samples | tokens | computed | tokens / computed [bar] | ms | padded / this [bar] | loss |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    assert isinstance(quickstart, LlamaForCausalLM)
    rows("quickstart", quickstart_samples(), quickstart, 64 * 256, 256, arguments.rounds)
    rows("agents", agent_samples(len(tokenizer)), LlamaForCausalLM(long_config), 2**14, 8, min(arguments.rounds, 3))
