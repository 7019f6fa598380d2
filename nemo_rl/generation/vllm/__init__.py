"""The engine `vllm`: entry.py is what the configuration reads, engine.py samples, worker.py loads weights."""
