"""Kernels and bytes of a compiled decoder layer, as torch's compiler schedules them on a CPU, for want of a device.

Which operations share a kernel depends little on the device. Attention is a kernel forward and a few backward besides.
"""

from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode, Scheduler
from transformers import AutoModelForCausalLM, Qwen2Config

from nemo_rl.policy import attention
from nemo_rl.policy.fsdp2.sharding import compile_layers
from tests.unit.policy.test_logprobs import QWEN_1_5B

LENGTH, COUNTED_LENGTH = 128, 8192  # bytes of all but matrix products are proportional to the tokens


@pytest.mark.slow  # compiles for a minute
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's tracing
def test_compiled_layer_is_few_kernels_that_move_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of a layer of Qwen2.5-1.5B's widths on a pack of 8,192 tokens; 110 and 6.7 GB uncompiled."""
    torch._dynamo.reset()
    numbers: list[int] = []
    sizes: list[int] = []
    generate = Scheduler.codegen

    def counted(scheduler: Any) -> Any:
        kernels = [node for node in scheduler.nodes if not isinstance(node, NopKernelSchedulerNode)]
        fused = [node for node in kernels if not isinstance(node, ExternKernelSchedulerNode)]
        numbers.append(len(kernels))
        sizes.append(sum(node.get_read_write_buffers_sizes() for node in fused))
        return generate(scheduler)

    monkeypatch.setattr(Scheduler, "codegen", counted)
    widths: dict[str, Any] = {**QWEN_1_5B, "num_hidden_layers": 1, "vocab_size": 100}
    model: Any = AutoModelForCausalLM.from_config(Qwen2Config(**widths), dtype=torch.bfloat16)
    model.eval().set_attn_implementation(attention.PACKED_ATTENTION)
    compile_layers(model)
    pack = attention.PackedSequences.of((LENGTH // 2, LENGTH // 2), LENGTH // 2, torch.device("cpu"))
    inputs = pack.model_inputs(torch.zeros(2, LENGTH // 2, dtype=torch.int64))
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        model.base_model(**inputs, use_cache=False).last_hidden_state.sum().backward()
    assert 30 < sum(numbers) <= 44
    assert 1.5e9 < sum(sizes) * COUNTED_LENGTH / LENGTH < 2.2e9
