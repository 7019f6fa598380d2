"""Speed of a training step: tokens/s, achieved TFLOP/s, share of the device's peak, peak memory.

Forward, backward and AdamW on a causal model with the shapes of Qwen2.5-1.5B and random weights, in bfloat16 on a GPU;
on a CPU in float32 and reduced (widths divided by 8, 2 layers, a vocabulary of 8192). Needs torch and transformers
alone; where this package is installed too, the step is also taken packed, by its own module, on sequences of different
lengths.

FLOP/s count 6 N a token for the weights that multiply (the output layer, not the embedding table) and 6 L H T^2 a
sequence for causal attention; recomputation is not counted. Peaks: dense bfloat16 of the data sheets; of a CPU, what
its best matrix product of 2048 x 2048 reaches in the same process.

    uv run benchmarks/train_throughput.py
    python train_throughput.py --tokens 16384 --length 4096 --recompute
"""

import argparse
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint
from transformers import Qwen2Config, Qwen2ForCausalLM

SHAPES = {
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32_768,
}
REDUCED = {
    **SHAPES,
    "vocab_size": 8192,
    "hidden_size": 192,
    "intermediate_size": 1120,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
}
PEAK_TFLOPS = {"H200": 989.0, "H100": 989.0, "B200": 2250.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0, "4090": 165.0}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CHUNK = 1024  # positions whose logits exist at once

Loss = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Work:
    """One way of taking the step."""

    name: str
    lengths: tuple[int, ...]
    losses: Sequence[Loss]  # of its micro-batches


def made_model(*, recompute: bool) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**(SHAPES if DEVICE.type == "cuda" else REDUCED)))
    torch.nn.Module.to(model, DEVICE, torch.bfloat16 if DEVICE.type == "cuda" else torch.float32).eval()
    if recompute:
        for layer in model.model.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return model


def plain_loss(model: Qwen2ForCausalLM, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the mean NLL of [B, T] tokens, from the logits of one chunk of positions at a time."""
    hidden = model.model(input_ids=token_ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    parts = zip(hidden.split(CHUNK), token_ids[:, 1:].flatten().split(CHUNK), strict=True)
    losses = [checkpoint(_nll, model.lm_head, h, targets, use_reentrant=False) for h, targets in parts]
    return torch.stack(losses).sum() / token_ids.numel()  # type: ignore[arg-type]


def _nll(head: torch.nn.Module, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(head(hidden).float(), targets, reduction="sum")


def plain_work(model: Qwen2ForCausalLM, tokens: int, length: int) -> Work:
    token_ids = torch.randint(model.config.vocab_size, (tokens // length, length), device=DEVICE)
    return Work("plain, equal lengths", (length,) * len(token_ids), [lambda: plain_loss(model, token_ids)])


def packed_work(model: Qwen2ForCausalLM, tokens: int, length: int) -> Work | None:
    """Lengths spread evenly up to `length`, in packs of as many tokens; None without this package."""
    try:
        from nemo_rl.policy.logprobs import CausalLogprobs
        from nemo_rl.policy.packing import pack_for_ranks
    except ImportError:
        return None
    lengths, left = [], tokens
    while left > 1:
        lengths.append(min(left, max(2, length * (len(lengths) % 8 + 1) // 8)))
        left -= lengths[-1]
    module = CausalLogprobs(model, temperature=1.0, chunk_size=CHUNK, packing_key="packing")
    losses = []
    for pack in pack_for_ranks(lengths, max(tokens, length), "modified_first_fit_decreasing")[0]:
        sizes = [lengths[i] for i in pack]
        token_ids = torch.randint(model.config.vocab_size, (len(sizes), max(sizes)), device=DEVICE)
        inside = torch.arange(max(sizes), device=DEVICE) < torch.tensor(sizes, device=DEVICE).unsqueeze(1)
        losses.append(partial(packed_loss, module, token_ids, inside, sizes))
    return Work("packed, lengths of an eighth to all", tuple(lengths), losses)


def packed_loss(
    module: torch.nn.Module, token_ids: torch.Tensor, inside: torch.Tensor, lengths: list[int]
) -> torch.Tensor:
    return -module(token_ids, inside, lengths=lengths).logprobs.sum() / sum(lengths)


def seconds(model: Qwen2ForCausalLM, work: Work, steps: int) -> float:
    """Return the median seconds of a step, after one warm-up step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    times = []
    for _ in range(steps + 1):
        _wait()
        started = time.perf_counter()
        for loss in work.losses:
            loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        _wait()
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def step_flops(model: Qwen2ForCausalLM, lengths: Sequence[int]) -> float:
    weights = sum(p.numel() for p in model.parameters())  # the tied table multiplies as the output layer
    config = model.config
    attention = 6 * config.num_hidden_layers * config.hidden_size * sum(n * n for n in lengths)
    return float(6 * weights * sum(lengths) + attention)


def peak_flops() -> float | None:
    """None: a GPU that is not in the table."""
    if DEVICE.type == "cuda":
        name = torch.cuda.get_device_name()
        return next((1e12 * peak for key, peak in PEAK_TFLOPS.items() if key in name), None)
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    best = float("inf")
    for _ in range(10):
        started = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - started)
    return 2 * 2048**3 / best


def peak_gib() -> float:
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def report(model: Qwen2ForCausalLM, work: Work, steps: int) -> None:
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    taken, flops, peak = seconds(model, work, steps), step_flops(model, work.lengths), peak_flops()
    share = f"{flops / taken / peak:.2f}" if peak else "not known"
    print(
        f"| {work.name} | {sum(work.lengths)} | {taken:.3f} | {sum(work.lengths) / taken:.0f} | "
        f"{flops / taken / 1e12:.3f} | {share} | {peak_gib():.2f} |",
        flush=True,
    )


if __name__ == "__main__":
    on_gpu = DEVICE.type == "cuda"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384 if on_gpu else 2048, help="of one step")
    parser.add_argument("--length", type=int, default=2048 if on_gpu else 256, help="of a sequence, at most")
    parser.add_argument("--steps", type=int, default=10 if on_gpu else 5)
    parser.add_argument("--recompute", action="store_true", help="activations in the backward pass")
    arguments = parser.parse_args()
    trained = made_model(recompute=arguments.recompute)
    name = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}; torch {torch.__version__}; {sum(p.numel() for p in trained.parameters()) / 1e6:.1f} M parameters\n")
    print("| step | tokens | s | tokens/s | TFLOP/s | share of peak | peak GiB |")
    print("|---|---|---|---|---|---|---|", flush=True)
    report(trained, plain_work(trained, arguments.tokens, arguments.length), arguments.steps)
    packed = packed_work(trained, arguments.tokens, arguments.length)
    if packed is not None:
        report(trained, packed, arguments.steps)
