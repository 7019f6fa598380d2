"""The engine `vllm`: entry.py is what the configuration reads, engine.py samples, worker.py loads weights.

cpu/ is only for engines on a CPU; a reader interested in GPUs can skip it.
"""
