"""`teacher` and `teachers.<task>`: frozen models that say how likely they find what the policy samples."""

from typing import Any, Literal

from pydantic import Field

from nemo_rl.config.batching import DynamicBatchingConfig, SequencePackingConfig
from nemo_rl.config.endpoint import ServedModelConfig
from nemo_rl.config.generation import ColocatedConfig
from nemo_rl.config.parallel import ParallelModelConfig
from nemo_rl.config.policy import TokenizerConfig


class TeacherConfig(ParallelModelConfig):
    """A model that is asked and never trained, on a backend and ranks of its own. NeMo-RL writes a whole policy section
    here."""

    model_name: str  # a Hugging Face name or a folder; with `server` its tokenizer alone is loaded from there
    tokenizer: TokenizerConfig = TokenizerConfig()
    hf_config_overrides: dict[str, Any] = Field(default_factory=dict)
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the policy's
    logprob_batch_size: int = Field(default=4, gt=0)  # samples of one forward pass
    logprob_chunk_size: int | None = Field(default=1024, gt=0)  # tokens whose logits exist at once; None: all
    sequence_packing: SequencePackingConfig = SequencePackingConfig()
    dynamic_batching: DynamicBatchingConfig = DynamicBatchingConfig()
    colocated: ColocatedConfig = ColocatedConfig()  # on the policy's devices, in turns; else on GPUs of its own
    server: ServedModelConfig | None = None  # a vLLM server that is asked over HTTP, in place of a model of this run
