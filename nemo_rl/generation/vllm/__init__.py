"""vLLM as an engine: entry.py is what the configuration reads, engine.py the engine, worker.py its half of a refit."""
