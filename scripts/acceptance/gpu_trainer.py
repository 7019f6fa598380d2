"""The trainer's half on one bare GPU, in about ten minutes.

It needs what the package itself imports (torch, transformers, tensordict, pydantic), but no network, vLLM or Ray.

PYTHONPATH=. python scripts/acceptance/gpu_trainer.py                   a random model of Qwen2.5-1.5B's shape
PYTHONPATH=. python scripts/acceptance/gpu_trainer.py --device cpu      a tiny one, to try the script itself
PYTHONPATH=. python scripts/acceptance/gpu_trainer.py --parts megatron  Megatron's worker, which needs its own process

Prints a table and writes gpu_trainer.json. Each part runs whether or not an earlier one failed; the exit code is 1
where one did. docs/gpu.md says what has been measured with it.
"""

import argparse
import json
import math
import multiprocessing
import pickle
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, cast

import torch
import torch.multiprocessing  # registers how tensors are handed over
from transformers import PreTrainedConfig, Qwen2Config, Qwen2ForCausalLM

from nemo_rl.config.policy import OptimizerConfig, PolicyConfig
from nemo_rl.distributed.tensor_transfer import new_token, receive_tensors, send_tensors
from nemo_rl.policy import log_softmax, logprobs
from nemo_rl.policy.hf_model import train_flops
from nemo_rl.policy.logprobs import CausalLogprobs
from nemo_rl.policy.ranks import SINGLE_RANK

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}  # bfloat16, dense (NVIDIA's data sheets)
GB = 1e9
IPC_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Sizes:
    """What one run measures with."""

    model: PreTrainedConfig
    tokens: int  # of one pass
    longest: int  # of a sequence
    chunk: int
    moved: int  # bytes
    sft_steps: int
    repeats: int


def sizes_for(device: str) -> Sizes:
    if device == "cpu":
        model = _qwen(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, heads=(4, 2))
        return Sizes(model, tokens=256, longest=64, chunk=64, moved=2**20, sft_steps=50, repeats=2)
    model = _qwen(vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, heads=(12, 2))
    return Sizes(model, tokens=8192, longest=1024, chunk=1024, moved=4 * 2**30, sft_steps=50, repeats=5)


def _qwen(*, heads: tuple[int, int], **widths: int) -> Qwen2Config:
    many, few = heads
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    return Qwen2Config(num_attention_heads=many, num_key_value_heads=few, tie_word_embeddings=True, **widths, **ends)  # type: ignore[arg-type]


class Bench:
    """A model in float32, computed in bfloat16, as the policy's trainer does on one rank."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        torch.manual_seed(0)
        self.lengths = _lengths(sizes)

    def module(self, *, packed: bool) -> CausalLogprobs:
        with torch.device(self.device):
            model: Any = Qwen2ForCausalLM(cast(Qwen2Config, self.sizes.model))
        key = "policy.sequence_packing.enabled" if packed else None
        return CausalLogprobs(model, temperature=1.0, chunk_size=self.sizes.chunk, packing_key=key)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return right-padded tokens and the mask of those that are scored."""
        width = max(self.lengths)
        ids = torch.randint(2, self.sizes.model.vocab_size, (len(self.lengths), width), device=self.device)
        mask = torch.arange(width, device=self.device) < torch.tensor(self.lengths, device=self.device).unsqueeze(1)
        return ids, mask

    def step(self, module: CausalLogprobs, optimizer: torch.optim.Optimizer) -> float:
        """Take an optimizer step and return the mean negative log-prob before it."""
        ids, mask = self.rows()
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = -module(ids, mask, lengths=self.lengths).logprobs.sum() / mask.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def _lengths(sizes: Sizes) -> list[int]:
    """Return lengths from an eighth of the longest to the longest, as responses have, of `tokens` in all."""
    lengths: list[int] = []
    while sum(lengths) < sizes.tokens:
        share = (1 + 7 * (len(lengths) * 0.618 % 1)) / 8
        lengths.append(min(int(share * sizes.longest), sizes.tokens - sum(lengths)))
    return [length for length in lengths if length > 1]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median time of a call after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure_training(bench: Bench, *, packed: bool) -> dict[str, Any]:
    """Measure tokens/s, MFU and peak memory of training steps on padded or packed rows."""
    module = bench.module(packed=packed)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6, fused=True)
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = seconds_of(partial(bench.step, module, optimizer), bench.device, bench.sizes.repeats)
    parameters = sum(p.numel() for p in module.parameters())
    flops = train_flops(parameters, bench.sizes.model, bench.lengths)
    found = {"seconds": seconds, "tokens_per_s": sum(bench.lengths) / seconds}
    if bench.device.type == "cuda":
        name = torch.cuda.get_device_name()
        peak_flops = next((value for key, value in PEAK_FLOPS.items() if key in name), math.nan)
        found |= {"mfu": flops / seconds / peak_flops, "peak_gb": torch.cuda.max_memory_allocated() / GB}
    return found


def measure_block_sizes(bench: Bench) -> dict[str, Any]:
    """Measure the log-probs of one chunk, forward and backward: by the numbers in a block of rows, and by kernels."""
    shape, device = (bench.sizes.chunk, bench.sizes.model.vocab_size), bench.device
    ids = torch.zeros((bench.sizes.chunk, 1), dtype=torch.int64, device=device)
    name = "CPU_BLOCK" if device.type == "cpu" else "ACCELERATOR_BLOCK"
    usual, has_kernels, found = getattr(log_softmax, name), log_softmax.has_kernels, {}

    def call() -> None:
        logits = torch.zeros(shape, device=device, requires_grad=True)
        log_softmax.logprobs_and_entropy(logits * 1, ids)[0].sum().backward()

    if device.type == "cuda":
        assert has_kernels(device), "Triton kernels are not used; the log says why"
        found["kernel_error"] = log_softmax.kernel_error(device)
        found["kernels_ms"] = 1e3 * seconds_of(call, device, bench.sizes.repeats)
    try:
        log_softmax.has_kernels = lambda device: False
        for power in (22, 24, 26, 28):
            setattr(log_softmax, name, 2**power)
            found[f"2**{power}_ms"] = 1e3 * seconds_of(call, device, bench.sizes.repeats)
    finally:
        setattr(log_softmax, name, usual)
        log_softmax.has_kernels = has_kernels
    return found


def measure_logits(bench: Bench) -> dict[str, Any]:
    """Measure a chunk's logits, rounded to bfloat16 or kept in float32: milliseconds and the mean error."""
    model, device = bench.sizes.model, bench.device
    head = torch.nn.Linear(model.hidden_size, model.vocab_size, bias=False, device=device, dtype=torch.bfloat16)
    with torch.no_grad():
        head.weight.normal_()
    hidden = torch.randn(bench.sizes.chunk, model.hidden_size, device=device).bfloat16().requires_grad_()
    few = hidden.detach()[:16]
    exact = few.double() @ head.weight.detach().double().T
    usual, found = logprobs.KEEPS_FLOAT32_LOGITS, {}
    try:
        for name, keeps_float32 in (("bfloat16", False), ("float32", True)):
            logprobs.KEEPS_FLOAT32_LOGITS = keeps_float32
            project = partial(logprobs.project_to_logits, head)
            with torch.no_grad():
                found[f"{name}_error"] = float((project(few).double() - exact).abs().mean() / exact.std())
            found[f"{name}_ms"] = 1e3 * seconds_of(
                lambda project=project: project(hidden).float().sum().backward(), device, bench.sizes.repeats
            )
    finally:
        logprobs.KEEPS_FLOAT32_LOGITS = usual
    assert found["float32_error"] < 0.1 * found["bfloat16_error"], found
    return found


def measure_fake_peak(bench: Bench) -> dict[str, Any]:
    """Compare the peak of FSDP2's real step on one rank with that of fake tensors."""
    from tests.support.memory_trace import TraceCase, trace_peaks

    policy = PolicyConfig(
        model_name="random",
        precision="bfloat16",
        device=cast(Any, bench.device.type),
        logprob_chunk_size=bench.sizes.chunk,
        dtensor_cfg={"keep_unsharded": False},  # type: ignore[arg-type]
    )
    tokens = sum(bench.lengths)
    (traced,) = trace_peaks([TraceCase(bench.sizes.model, policy, SINGLE_RANK, tokens)])
    found: dict[str, Any] = {"fake_gb": traced.training / GB}
    if bench.device.type == "cuda":
        found |= {"real_gb": _real_peak(bench, policy) / GB}
        found["real_over_fake"] = found["real_gb"] / found["fake_gb"]
    return found


def _real_peak(bench: Bench, policy: PolicyConfig) -> int:
    from nemo_rl.policy.fsdp2.sharding import shard

    module = bench.module(packed=True)
    shard(module, policy, SINGLE_RANK, bench.device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-6, fused=True)
    ids, mask = bench.rows()
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            module(ids, mask, lengths=bench.lengths).logprobs.sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated()


def measure_moves(bench: Bench) -> dict[str, Any]:
    """Measure copies off the device and back, through fresh pageable memory and through kept buffers of the policy."""
    from nemo_rl.policy.offload import Offloader

    content = torch.ones(bench.sizes.moved, dtype=torch.uint8, device=bench.device)
    gigabytes = 2 * bench.sizes.moved / GB
    pageable = seconds_of(lambda: content.to("cpu", copy=True).to(bench.device), bench.device, bench.sizes.repeats)
    offloader = Offloader(bench.device)

    def move() -> None:
        offloader.offload({"weights": [content]})
        offloader.onload(["weights"])

    kept = seconds_of(move, bench.device, bench.sizes.repeats)
    assert bool((content == 1).all()), "the moved bytes changed"
    return {"pageable_gb_per_s": gigabytes / pageable, "kept_gb_per_s": gigabytes / kept}


def measure_ipc(bench: Bench) -> dict[str, Any]:
    """Measure handing a tensor to another process: by handle on CUDA, by shared memory on a CPU."""
    tensor = torch.arange(bench.sizes.moved // 4, dtype=torch.int32, device=bench.device)
    with _other_process(_read_tensor) as connection:
        start = time.perf_counter()
        connection.send_bytes(ForkingPickler.dumps(tensor if tensor.is_cuda else tensor.share_memory_()))
        total = _receive(connection, "read the tensor")
        seconds = time.perf_counter() - start
        assert total == int(tensor.long().sum()), "the other process read other bytes"
    return {"seconds": seconds, "gb": bench.sizes.moved / GB}


@contextmanager
def _other_process(target: Callable[..., None], *args: Any) -> Iterator[Any]:
    """Start `target` with a connection and `args`; yield the other end once it has sent that it is ready."""
    context = multiprocessing.get_context("spawn")
    connection, other_end = context.Pipe()
    process = context.Process(target=target, args=(other_end, *args), daemon=True)
    process.start()
    try:
        _receive(connection, "start")
        yield connection
    finally:
        process.join(timeout=10)
        if process.is_alive():
            process.kill()


def _receive(connection: Any, what: str) -> Any:
    if not connection.poll(IPC_TIMEOUT_S):
        raise TimeoutError(f"the other process did not {what}")
    return connection.recv()


def _read_tensor(connection: Any) -> None:
    connection.send("ready")
    tensor = pickle.loads(connection.recv_bytes())
    connection.send(int(tensor.long().sum()))


def measure_buckets(bench: Bench) -> dict[str, Any]:
    """Measure the transport `cuda_ipc` between two processes: tensors through one bucket, compared at the other end."""
    device, size = bench.device, bench.sizes.moved // 8
    tensors = [(f"weight {n}", torch.full((size // 2,), n, dtype=torch.bfloat16, device=device)) for n in range(8)]
    token = new_token()
    with _other_process(_receive_buckets, token, device.type) as connection:
        start = time.perf_counter()
        send_tensors(tensors, token, device=device, timeout_s=IPC_TIMEOUT_S)
        seconds = time.perf_counter() - start
        found = _receive(connection, "compare the tensors")
        assert found == [(name, n, size // 2) for n, (name, _) in enumerate(tensors)], "other bytes arrived"
    return {"seconds": seconds, "gb_per_s": bench.sizes.moved / GB / seconds}


def _receive_buckets(connection: Any, token: str, device_type: str) -> None:
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    connection.send("ready")
    found = []
    for name, tensor in receive_tensors(token, device=device, timeout_s=IPC_TIMEOUT_S):
        value = float(tensor.float().mean())
        found.append((name, value if bool((tensor == value).all()) else None, len(tensor)))
    connection.send(found)


def measure_sft(bench: Bench, **options: Any) -> dict[str, Any]:
    """Train on one small batch through the policy's own worker; its loss must fall by a half."""
    from nemo_rl.policy.worker import make_policy_worker

    steps = bench.sizes.sft_steps
    with tempfile.TemporaryDirectory() as directory:
        model: Any = Qwen2ForCausalLM(cast(Qwen2Config, bench.sizes.model))
        model.to(torch.bfloat16).save_pretrained(directory)
        policy = PolicyConfig(
            model_name=directory,
            precision="bfloat16" if bench.device.type == "cuda" else "float32",
            device=cast(Any, bench.device.type),
            train_global_batch_size=8,
            train_micro_batch_size=8,
            max_total_sequence_length=bench.sizes.longest,
            optimizer=OptimizerConfig(kwargs={"lr": 1e-4 if bench.device.type == "cuda" else 1e-2}),
            **options,
        )
        worker = make_policy_worker(
            policy,
            layout=SINGLE_RANK,
            model_path=directory,
            temperature=1.0,
            needs_reference=False,
            num_samples_per_step=8,
            seed=0,
        )
        batch, loss = _sft_batch(bench)
        start = time.perf_counter()
        losses = [worker.train_step(batch, loss)["loss"] for _ in range(steps)]
        seconds = (time.perf_counter() - start) / steps
        worker.close()
    assert losses[-1] < 0.5 * losses[0], f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f} only"
    return {"first_loss": losses[0], "last_loss": losses[-1], "seconds_a_step": seconds}


def _sft_batch(bench: Bench) -> tuple[Any, Any]:
    from tensordict import TensorDict

    from nemo_rl import batch as keys
    from nemo_rl.loss_types import Metric, RequiredScores
    from nemo_rl.policy.micro_batches import loss_mask

    class NegativeLogLikelihood:
        required_keys = frozenset({keys.TOKEN_MASK, keys.SAMPLE_MASK})
        required_scores = RequiredScores()

        def __call__(self, scores: Any, batch: Any, normalizer: Any) -> tuple[torch.Tensor, dict[str, Metric]]:
            return -(scores.logprobs * loss_mask(batch)).sum() / normalizer.num_valid_tokens, {}

    width = min(bench.sizes.longest, 128)
    content = {
        keys.TOKEN_IDS: torch.randint(2, min(bench.sizes.model.vocab_size, 64), (8, width)),
        keys.TOKEN_MASK: torch.ones(8, width),
        keys.SAMPLE_MASK: torch.ones(8),
        keys.GROUP_ID: torch.arange(8),
        keys.TRAJECTORY_ID: torch.arange(8),
        keys.LENGTHS: torch.full((8,), width),
    }
    return TensorDict(content, batch_size=[8]), NegativeLogLikelihood()


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "train_padded": lambda bench: measure_training(bench, packed=False),
    "train_packed": lambda bench: measure_training(bench, packed=True),
    "block_sizes": measure_block_sizes,
    "logits": measure_logits,
    "fake_tensor_peak": measure_fake_peak,
    "moves": measure_moves,
    "ipc": measure_ipc,
    "buckets": measure_buckets,
    "sft": measure_sft,
    "megatron": lambda bench: measure_sft(bench, megatron_cfg={"enabled": True}),
}
OF_OWN_PROCESS = ("megatron",)  # sets up process groups, and on a CPU changes torch.cuda, for all of its process


def run_parts(bench: Bench, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in names:
        start = time.perf_counter()
        torch.manual_seed(0)  # no part depends on those before it
        try:
            found = PARTS[name](bench)
        except Exception as error:  # the figures of the other parts are worth having
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
        yield name, {**found, "took_s": round(time.perf_counter() - start, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path("gpu_trainer.json"))
    usual = [name for name in PARTS if name not in OF_OWN_PROCESS]
    parser.add_argument("--parts", default=",".join(usual), help="comma-separated; default: all but megatron")
    arguments = parser.parse_args()
    names = arguments.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--parts: no such part {unknown[0]!r}; allowed: {', '.join(PARTS)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device; allowed: cpu, which tries the script itself")
    device = torch.device(arguments.device)
    title = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    results: dict[str, Any] = {"device": title, "torch": torch.__version__}
    print(f"{title}, torch {torch.__version__}\n\n| part | figure | value |\n|---|---|---|")
    for name, found in run_parts(Bench(sizes_for(arguments.device), device), names):
        results[name] = found
        for figure, value in found.items():
            print(
                f"| {name} | {figure} | {value:.4g} |"
                if isinstance(value, float)
                else f"| {name} | {figure} | {value} |"
            )
        sys.stdout.flush()
        arguments.out.write_text(json.dumps(results, indent=1))
    return int(any("error" in found for found in results.values() if isinstance(found, dict)))


if __name__ == "__main__":
    sys.exit(main())
