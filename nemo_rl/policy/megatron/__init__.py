"""The policy on Megatron-core: tensor, pipeline and data parallel. Only its checks may be imported where it is off."""
