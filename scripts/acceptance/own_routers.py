"""A worker of vLLM on a CPU with vLLM's own routers, whose logits are bfloat16 as on a GPU (router_replay.py)."""

from vllm.model_executor.custom_op import op_registry_oot

from nemo_rl.generation.vllm.cpu.worker import CpuWeightLoadingExtension

op_registry_oot.pop("GateLinear")


class OwnRouters(CpuWeightLoadingExtension):
    """As in a run, but for the layer that this module takes back."""
