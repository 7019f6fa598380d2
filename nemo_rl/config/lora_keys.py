"""NeMo-RL's keys of LoRA that this project does not have: their part of the table in compatibility.py."""

from nemo_rl.config.rules import defaulted, dropped, ignored, rejected

_KEY = "policy.dtensor_cfg.lora_cfg"

LORA_RULES = (
    rejected(f"{_KEY}.dropout", "dropout is off: log-probs are those of the sampled model", 0),
    dropped(f"{_KEY}.dropout_position"),
    ignored(f"{_KEY}.use_triton", "adapters are peft's, which has no kernels", None, False),
    ignored(f"{_KEY}.lora_dtype", "adapters are float32", None, "float32"),
    rejected(f"{_KEY}.use_dora", "adapters are plain LoRA", False),
    defaulted(f"{_KEY}.target_modules", None),
    defaulted(f"{_KEY}.exclude_modules", None),
    ignored("checkpointing.is_peft", f"{_KEY}.enabled says whether there are adapters", None, False),
    dropped("checkpointing.peft_config"),
)
