"""Kernels and bytes of the real modules on fake CUDA tensors: bars that may only fall, and no wait for the device.

Sizes are Qwen2.5-1.5B's: a chunk of 1,024 positions and a pack of 8,192 tokens. Every operation that returns a new
tensor, or writes to one, is a kernel and moves its arguments and results once. Autograd cannot run on fake CUDA
tensors without a device, so backward passes are called by hand, or run on the meta device.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoModelForCausalLM, Qwen2Config

from nemo_rl.policy import attention, log_softmax
from nemo_rl.policy.linear_logprobs import LinearOptions, _LinearLogprobs
from tests.unit.policy.test_logprobs import QWEN_1_5B

CUDA = torch.device("cuda", 0)
HIDDEN, VOCABULARY, CHUNK, LENGTH = 1536, 151936, 1024, 4096
NO_KERNEL = {"empty", "empty_like", "_unsafe_view"}
PRODUCTS = {"mm", "addmm", "addmm_", "bmm"}  # whose traffic the matrix units hide
# Operators that copy to the host, or whose result's shape depends on values: each waits for all kernels before it.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "item", "unique_dim", "_unique2", "is_nonzero", "equal"}


class CountKernels(TorchDispatchMode):
    """Counts kernels, the bytes that all but matrix products move, and the operations that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.bytes = 0
        self.product_dtypes: set[torch.dtype] = set()
        self.waiting: list[str] = []

    @property
    def number(self) -> int:
        return len(self.names)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in WAITING or self._leaves_device(args, result):
            self.waiting.append(name)
        is_write = func._schema.is_mutable
        if (any(True for _ in tensors(result)) and not func.is_view and name not in NO_KERNEL) or is_write:
            self.names.append(name)
            if name in PRODUCTS:
                self.product_dtypes |= {tensor.dtype for tensor in tensors(args)}
            else:
                read_and_written = [*tensors((args, kwargs)), *(() if is_write else tensors(result))]
                self.bytes += sum(tensor.nbytes for tensor in read_and_written)
        return result

    @staticmethod
    def _leaves_device(args: Any, result: Any) -> bool:
        is_on_device = any(tensor.device.type == "cuda" for tensor in tensors(args))
        return is_on_device and any(tensor.device.type == "cpu" for tensor in tensors(result))


def tensors(values: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_iter(values) if isinstance(leaf, torch.Tensor))


@pytest.fixture
def has_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_softmax, "has_kernels", lambda device: True)


def count_head(num_chunks: int, *, entropy: bool) -> CountKernels:
    """Return the counts of forward and backward on a number of chunks."""
    number = num_chunks * CHUNK
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        hidden = torch.empty(number, HIDDEN, device=CUDA, dtype=torch.bfloat16)
        weight = torch.empty(VOCABULARY, HIDDEN, device=CUDA, dtype=torch.bfloat16)
        ids = torch.empty(number, 1, device=CUDA, dtype=torch.int64)
        saved: list[Any] = []
        context = SimpleNamespace(save_for_backward=lambda *values: saved.extend(values), needs_input_grad=[True] * 2)
        with CountKernels() as seen:
            scores = _LinearLogprobs.forward(context, hidden, weight, ids, LinearOptions(1 / 0.7, entropy, CHUNK))
            context.saved_tensors = saved
            gradients = _LinearLogprobs.backward(context, *(torch.empty_like(part) for part in scores))
    assert [part.dtype for part in scores] == [torch.float32] * 2
    assert [gradient.dtype for gradient in gradients[:2]] == [torch.bfloat16] * 2
    return seen


@pytest.mark.usefixtures("has_kernels")
@pytest.mark.parametrize("entropy", [False, True])
def test_head_chunk_is_six_kernels_that_wait_for_nothing(entropy: bool) -> None:
    """Logits twice, their statistics, their gradient and its two products; 10 more per call."""
    two, three = count_head(2, entropy=entropy), count_head(3, entropy=entropy)
    assert three.number - two.number <= 6 + (not entropy)  # zeros in place of entropies
    assert two.number - 2 * (three.number - two.number) <= 10
    assert three.bytes - two.bytes < 1.57e9
    assert three.product_dtypes == {torch.bfloat16}
    assert two.waiting == three.waiting == []


def count_layers(number: int) -> CountKernels:
    """Return the counts of the forward pass of decoder layers on a pack of two sequences."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(CUDA), torch.no_grad():
        sizes = {**QWEN_1_5B, "num_hidden_layers": number}
        model: Any = AutoModelForCausalLM.from_config(Qwen2Config(**sizes), dtype=torch.bfloat16)
        model.eval().set_attn_implementation(attention.PACKED_ATTENTION)
        token_ids = torch.empty(1, 2 * LENGTH, dtype=torch.int64)
        bounds, is_not_padding = torch.empty(3, dtype=torch.int32), torch.ones(2, LENGTH, dtype=torch.bool)
        pack = attention.PackedSequences((LENGTH, LENGTH), bounds, is_not_padding, token_ids)
        with CountKernels() as seen:
            model.base_model(input_ids=token_ids, position_ids=token_ids, pack=pack, use_cache=False)
    return seen


def test_layer_waits_for_nothing_and_multiplies_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda query, value: True)
    one, two = count_layers(1), count_layers(2)
    assert two.waiting == one.waiting == []
    assert two.product_dtypes - one.product_dtypes == set()
    assert two.number - one.number <= 48
    assert two.bytes - one.bytes < 3.4e9
