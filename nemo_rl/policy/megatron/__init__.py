"""The policy backend on Megatron-core: `backend` and `mapping` need no Megatron, `worker` computes."""
