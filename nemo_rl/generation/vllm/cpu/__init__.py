"""vLLM on a CPU: settings, an engine thread, float32 layers, and refits that repeat recorded copies."""
