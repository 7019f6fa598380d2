"""`teacher` and `teachers.<task>`: frozen models that say how likely they find what the policy samples."""

from typing import Any, Literal

from pydantic import Field

from nemo_rl.config.batching import DynamicBatching, SequencePacking
from nemo_rl.config.endpoint import ServedModel
from nemo_rl.config.generation import Colocated
from nemo_rl.config.parallel import ParallelModel
from nemo_rl.config.policy import Tokenizer


class Teacher(ParallelModel):
    """A model that is asked and never trained, on a backend and ranks of its own. NeMo-RL writes a whole policy section
    here."""

    model_name: str  # a Hugging Face name or a folder; with `server` its tokenizer alone is loaded from there
    tokenizer: Tokenizer = Tokenizer()
    hf_config_overrides: dict[str, Any] = Field(default_factory=dict)
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: the policy's
    logprob_batch_size: int = Field(default=4, gt=0)  # samples of one forward pass
    logprob_chunk_size: int | None = Field(default=1024, gt=0)  # tokens whose logits exist at once; None: all
    sequence_packing: SequencePacking = SequencePacking()
    dynamic_batching: DynamicBatching = DynamicBatching()
    colocated: Colocated = Colocated()  # on the policy's devices, in turns; else on GPUs of its own
    server: ServedModel | None = None  # a vLLM server that is asked over HTTP, in place of a model of this run
