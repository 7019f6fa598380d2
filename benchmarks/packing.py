"""Gain of packing: how full the packs are, and a training step packed against the same step padded.

Lengths are those of real rollouts (rollout_lengths.json: tokens of prompt and response in the 315 example rollouts that
63 environments of NeMo Gym 0.4.0 ship, cut at 16,384) and log-normal ones. "First-fit-decreasing" is the share of real
tokens in the packs that it fills for a single rank. A step is forward, backward and AdamW on a random Qwen2; lengths
are scaled to at most 1024 there. Each round takes the four steps in turn, and ratios are medians over rounds.

    uv run benchmarks/packing.py               both tables
    uv run benchmarks/packing.py --rounds 0    only how full the packs are
"""

import argparse
import copy
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tensordict import TensorDict
from transformers import Qwen2Config, Qwen2ForCausalLM

from nemo_rl.loss_types import Metric, Normalizer, RequiredScores, TokenScores
from nemo_rl.policy.fsdp2.worker import FSDP2Trainer
from nemo_rl.policy.logprobs import CausalLogprobs
from nemo_rl.policy.micro_batches import MicroBatching, PackedTokens, PaddedTokens, SampleCount
from nemo_rl.policy.packing import ALGORITHMS, first_fit_decreasing, pack_for_ranks

RECORDED = Path(__file__).parent / "rollout_lengths.json"
FILL_BAR, SPEED_BAR = 0.97, 1.5
NUM_SAMPLES = 512  # of the log-normal ones


def recorded_lengths() -> list[int]:
    """In a random order."""
    lengths = json.loads(RECORDED.read_text())
    random.Random(0).shuffle(lengths)
    return lengths


def lognormal_lengths(number: int = NUM_SAMPLES, *, median: int = 180, limit: int = 1536) -> list[int]:
    draw = random.Random(0)
    return [min(limit, 2 + int(median * draw.lognormvariate(0, 0.9))) for _ in range(number)]


def fill_rows(name: str, lengths: Sequence[int]) -> None:
    longest = max(lengths)
    for capacity in (longest, 2 * longest, 4 * longest):
        bound = sum(lengths) / (len(first_fit_decreasing(lengths, capacity)) * capacity)
        for algorithm in ALGORITHMS:
            shares = []
            for num_ranks in (1, 2, 8):
                ranks = pack_for_ranks(lengths, capacity, algorithm, num_ranks)
                shares.append(sum(lengths) / (capacity * sum(map(len, ranks))))
            bar = f" [{FILL_BAR}]" if algorithm == "modified_first_fit_decreasing" else ""
            shown = " | ".join(f"{share:.3f}" for share in shares)
            print(f"| {name} | {capacity} | {algorithm} | {shown} | {bound:.3f} | {shares[0] / bound:.3f}{bar} |")


@dataclass(frozen=True)
class InOrder:
    """So many samples as they come, each micro-batch padded to its longest."""

    size: int
    length_multiple: int = 1

    def parts(self, lengths: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
        return [[list(range(i, min(i + self.size, len(lengths)))) for i in range(0, len(lengths), self.size)]]

    def pair_length(self, lengths: Sequence[int]) -> int:
        return max(lengths)


class NLL:
    """The mean of -advantage * log-prob."""

    required_keys = frozenset({"advantages"})
    required_scores = RequiredScores()

    def __call__(
        self, scores: TokenScores, batch: TensorDict, normalizer: Normalizer
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        return -(batch["advantages"] * scores.logprobs).sum() / normalizer.num_valid_tokens, {}


def batch_of(lengths: Sequence[int], vocabulary: int) -> TensorDict:
    torch.manual_seed(0)
    shape = (len(lengths), max(lengths))
    inside = torch.arange(shape[1]) < torch.tensor(lengths).unsqueeze(1)
    rows = torch.arange(shape[0])
    return TensorDict(
        {
            "token_ids": torch.randint(1, vocabulary, shape) * inside,
            "token_mask": inside.float(),
            "lengths": torch.tensor(lengths),
            "sample_mask": torch.ones(shape[0]),
            "trajectory_id": rows,
            "group_id": rows // 8,
            "advantages": torch.randn(shape[0], 1).expand(shape).clone(),
        },
        batch_size=[shape[0]],
    )


def trainer(model: Qwen2ForCausalLM, batching: MicroBatching) -> FSDP2Trainer:
    module = CausalLogprobs(
        copy.deepcopy(model),
        temperature=1.0,
        chunk_size=1024,
        packing_key="packing" if isinstance(batching, PackedTokens) else None,
    )
    return FSDP2Trainer(
        module=module,
        device=torch.device("cpu"),
        optimizer=torch.optim.AdamW(module.parameters(), lr=1e-6, fused=True),
        batching=batching,
        max_grad_norm=1.0,
    )


def padded_tokens(lengths: Sequence[int], batching: MicroBatching) -> int:
    """Tokens that the model computes in one step."""
    parts = batching.parts(lengths, 1)[0]
    if isinstance(batching, PackedTokens):
        return sum(lengths)
    multiple = batching.length_multiple
    return sum(len(part) * -(-max(lengths[i] for i in part) // multiple) * multiple for part in parts)


def step_rows(name: str, lengths: Sequence[int], rounds: int, micro_batch: int = 4) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
    )
    model, budget = Qwen2ForCausalLM(config), micro_batch * max(lengths)
    batch, rows = batch_of(lengths, config.vocab_size), torch.arange(len(lengths))
    ways: dict[str, MicroBatching] = {
        "padded, in order": InOrder(micro_batch),
        "padded, sorted": SampleCount(micro_batch),
        "dynamic batching": PaddedTokens(budget, "tokens", 64),
        "packed": PackedTokens(budget, "tokens", "modified_first_fit_decreasing"),
    }
    trainers = {way: trainer(model, batching) for way, batching in ways.items()}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    losses: dict[str, float] = {}
    for index in range(rounds + 1):  # the first warms up
        for way, one in trainers.items():
            started = time.perf_counter()
            loss = one.optimizer_step(batch, rows, NLL()).metrics["loss"]
            if index == 0:
                losses[way] = loss
            else:
                seconds[way].append(time.perf_counter() - started)
    for way, batching in ways.items():
        ratios = [a / b for a, b in zip(seconds["padded, in order"], seconds[way], strict=True)]
        bar = f" [{SPEED_BAR}]" if way == "packed" else ""
        computed = padded_tokens(lengths, batching)
        print(
            f"| {name} | {way} | {len(batching.parts(lengths, 1)[0])} | {sum(lengths) / computed:.2f} | "
            f"{statistics.median(seconds[way]):.2f} | {statistics.median(ratios):.2f}{bar} | {losses[way]:.6f} |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=64, help="of a timed step")
    arguments = parser.parse_args()
    distributions = {"real rollouts": recorded_lengths(), "log-normal": lognormal_lengths()}
    print("| lengths | pack | algorithm | 1 rank | 2 ranks | 8 ranks | first-fit-decreasing | 1 rank / that [bar] |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for each, its_lengths in distributions.items():
        fill_rows(each, its_lengths)
    if arguments.rounds:
        print("\n| lengths | step | micro-batches | real / computed tokens | s | padded in order / this [bar] | loss |")
        print("|---|---|---|---|---|---|---|", flush=True)
        for each, its_lengths in distributions.items():
            shrunk = [max(2, n * 1024 // max(its_lengths)) for n in its_lengths[: arguments.samples]]
            step_rows(each, shrunk, arguments.rounds)
