"""`teacher` and `teachers.<task>`: frozen models that say how likely they find what the policy samples."""

from typing import Any, Literal

from pydantic import Field

from nemo_rl.config.policy import DTensorCfg, Tokenizer
from nemo_rl.config.section import Section


class Teacher(Section):
    """A model of a policy backend that is asked and never trained. NeMo-RL writes a whole policy section here."""

    model_name: str  # a Hugging Face name or a folder
    tokenizer: Tokenizer = Tokenizer()
    hf_config_overrides: dict[str, Any] = Field(default_factory=dict)
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    logprob_batch_size: int = Field(default=4, gt=0)  # samples of one forward pass
    logprob_chunk_size: int | None = Field(default=1024, gt=0)  # tokens whose logits exist at once; None: all
    dtensor_cfg: DTensorCfg = DTensorCfg()
