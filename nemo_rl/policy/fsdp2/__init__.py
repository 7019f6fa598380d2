"""The policy backend on FSDP2 and DTensor: `backend` is torch-free, `worker` computes."""
