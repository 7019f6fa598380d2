"""What a rank keeps of 32,768 packed tokens when 1, 2 and 4 ranks share them, on a CPU over gloo.

Each layout has its own processes. Saved are the distinct storages that the backward pass needs, weights excluded; the
bars are for them. Beside them is how far resident memory rises above what the process held before, which also has
gloo's buffers, the allocator's unused blocks and the copies of an exchange while it lasts: it falls by less.

    uv run benchmarks/long_context.py
    uv run benchmarks/long_context.py --tokens 65536 --recompute
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import Qwen3Config, Qwen3ForCausalLM

from nemo_rl.policy.context_parallel import SLICED_ATTENTION, ContextRanks
from nemo_rl.policy.hf_model import decoder_layers, recompute_activations
from nemo_rl.policy.logprobs import CausalLogprobs

SEQUENCES = 8
BARS = {2: 0.55, 4: 0.30}


def made_module(recompute: bool) -> CausalLogprobs:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 2,
        "head_dim": 64,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 131_072}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=True)).eval()
    module = CausalLogprobs(model, temperature=1.0, chunk_size=1024, context=("context", 2))
    if recompute:
        recompute_activations(decoder_layers(model))
    return module


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measure(rank: int, size: int, store: str, tokens: int, recompute: bool, figures: str) -> None:
    torch.set_num_threads(1)
    module = made_module(recompute)
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        assert dist.group.WORLD is not None
        module.context = ContextRanks(dist.group.WORLD, rank, size)
        module.model.set_attn_implementation(SLICED_ATTENTION)
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    token_ids = torch.randint(512, (SEQUENCES, tokens // SEQUENCES), generator=torch.Generator().manual_seed(1))
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    before, started = status("VmRSS"), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = module(token_ids, torch.ones_like(token_ids, dtype=torch.bool))
    scores.logprobs.sum().backward()
    if rank == 0:
        found = (sum(kept.values()), status("VmHWM") - before, time.perf_counter() - started)
        Path(figures).write_text(" ".join(map(str, found)))
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768, help=f"in {SEQUENCES} sequences")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="that share the row, the first alone")
    parser.add_argument("--recompute", action="store_true", help="activation_checkpointing")
    arguments = parser.parse_args()
    print(f"| ranks for {arguments.tokens} tokens | saved MiB | share [bar] | resident MiB above start | s |")
    print("|---|---|---|---|---|", flush=True)
    whole = 0.0
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as directory:
            result = f"{directory}/figures"
            given = (ranks, f"{directory}/store", arguments.tokens, arguments.recompute, result)
            mp.spawn(measure, args=given, nprocs=ranks)  # type: ignore[attr-defined]
            saved, resident, seconds = map(float, Path(result).read_text().split())
        whole = whole or saved
        bar = f" [{BARS[ranks]}]" if ranks in BARS else ""
        share = f"{saved / whole:.3f}{bar}"
        print(f"| {ranks} | {saved / 2**20:.0f} | {share} | {resident / 2**20:.0f} | {seconds:.0f} |", flush=True)
