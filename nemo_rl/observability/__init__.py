"""What a run tells: loggers (JSON lines, W&B, TensorBoard), timers, the terminal's display, the names of metrics."""
