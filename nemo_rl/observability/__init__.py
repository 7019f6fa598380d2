"""Observability of a run: loggers (JSON Lines, W&B, TensorBoard), timers, progress display, closing summary."""
