"""Types of models in NeMo-RL's recipes, by config.json if it is on this machine, else by the name on the hub."""

import re
from typing import Any

HUB_TYPES = {  # names of models with experts, and of those that see
    r"HuggingFaceTB/SmolVLM2-": "smolvlm",
    r"Qwen/Qwen2\.5-VL-": "qwen2_5_vl",
    r"Qwen/Qwen3-VL-(?!.*-A\d+B)": "qwen3_vl",
    r"Qwen/Qwen3-(Coder-)?(30B-A3B|235B-A22B)": "qwen3_moe",
    r"mistralai/Mixtral-": "mixtral",
    r"zai-org/GLM-4\.5(-|$)(?!.*V)": "glm4_moe",
    r"deepseek-ai/DeepSeek-V3": "deepseek_v3",
    r"moonshotai/Moonlight-": "deepseek_v3",
    r"openai/gpt-oss-": "gpt_oss",
    r"nvidia/NVIDIA-Nemotron-3(\.\d)?-": "nemotron_h",
    r"nemo_rl/quickstart-moe(-|$)": "mixtral",  # before it is made
}


def read_values(key: str, name: Any) -> dict[str, Any] | None:
    """Return the values of a model's config.json on this machine; None without one."""
    from nemo_rl.launch.model_files import read_model_config  # here: other recipes need none

    return read_model_config(key, name) if isinstance(name, str) else None


def find_model_type(key: str, name: Any) -> str | None:
    """Return the type of the model that the recipe's `key` names; None if neither file nor name tells.

    Example: `nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16` is "nemotron_h".
    """
    values = read_values(key, name)
    if values is not None:
        return values.get("model_type")
    return next((kind for pattern, kind in HUB_TYPES.items() if re.match(pattern, str(name))), None)
