"""Peak memory of log-probs on a vocabulary of 150,000, against log_softmax on whole logits.

Each figure is from a process of its own: how far memory rises above what the model and its gradients take, on a CPU the
resident memory that the kernel counts, on a GPU torch's own count. The model's body is small, so that what is measured
is the output layer. The naive way is that of a plain Hugging Face model: logits [B, T, V], log_softmax, gather, and the
entropy from the same log-softmax.

    uv run benchmarks/logprob_memory.py
    uv run benchmarks/logprob_memory.py --samples 4 --chunk 1024
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from nemo_rl.loss_types import RequiredScores
from nemo_rl.policy.logprobs import CausalLogprobs

VOCABULARY, LENGTH = 151_936, 1024
BAR = 0.25
PASSES = ("log-probs", "log-probs, with backward", "log-probs and entropy, with backward")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def made_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config).eval()
    torch.nn.Module.to(model, DEVICE)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def scored(model: Qwen2ForCausalLM, token_ids: torch.Tensor, *, chunk: int | None, entropy: bool) -> torch.Tensor:
    """Return the sums of all log-probs and entropies; `chunk` None: the naive way."""
    if chunk is None:
        logprobs = model(input_ids=token_ids, use_cache=False).logits[:, :-1].log_softmax(-1)
        total = logprobs.gather(-1, token_ids[:, 1:, None]).sum()
        return total - (logprobs.exp() * logprobs).sum() if entropy else total
    module = CausalLogprobs(model, temperature=1.0, chunk_size=chunk)
    scores = module(token_ids, torch.ones_like(token_ids, dtype=torch.bool), RequiredScores(entropy=entropy))
    return scores.logprobs.sum() + scores.entropy.sum() if scores.entropy is not None else scores.logprobs.sum()


def held_bytes() -> int:
    if DEVICE.type == "cuda":
        return torch.cuda.memory_allocated()
    return _status("VmRSS")


def peak_bytes() -> int:
    if DEVICE.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return _status("VmHWM")


def begin_peak() -> None:
    """Forget the peak of making the model."""
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measure(which: str, num_samples: int, chunk: int | None) -> None:
    """Print the figures of one way, as JSON."""
    model = made_model()
    warm = torch.arange(8, device=DEVICE).unsqueeze(0)
    scored(model, warm, chunk=chunk, entropy=True).backward()
    token_ids = torch.randint(VOCABULARY, (num_samples, LENGTH), device=DEVICE)
    before = held_bytes()
    begin_peak()
    started = time.perf_counter()
    with torch.set_grad_enabled("backward" in which):
        total = scored(model, token_ids, chunk=chunk, entropy="entropy" in which)
        if "backward" in which:
            total.backward()
    value = float(total)
    print(json.dumps({"bytes": peak_bytes() - before, "s": time.perf_counter() - started, "value": value}))


def in_a_process(which: str, num_samples: int, chunk: int | None) -> dict[str, float]:
    command = [sys.executable, __file__, "--only", which, "--samples", str(num_samples), "--chunk", str(chunk or 0)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16 if DEVICE.type == "cuda" else 2, help=f"of {LENGTH} tokens")
    parser.add_argument("--chunk", type=int, default=1024 if DEVICE.type == "cuda" else 256, help="logprob_chunk_size")
    parser.add_argument("--only", choices=PASSES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        measure(arguments.only, arguments.samples, arguments.chunk or None)
        sys.exit()
    tokens = arguments.samples * LENGTH
    print(f"| pass over {tokens} tokens | naive MiB | s | chunks of {arguments.chunk} MiB | s | share [{BAR}] | sums |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for each in PASSES:
        naive, own = (in_a_process(each, arguments.samples, chunk) for chunk in (None, arguments.chunk))
        mib = [figures["bytes"] / 2**20 for figures in (naive, own)]
        print(
            f"| {each} | {mib[0]:.0f} | {naive['s']:.1f} | {mib[1]:.0f} | {own['s']:.1f} | {mib[1] / mib[0]:.3f} | "
            f"{naive['value']:.1f}, {own['value']:.1f} |",
            flush=True,
        )
