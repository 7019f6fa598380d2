"""From a run to its model: `nemo-rl export`, `serve` and `chat`. A leaf: nothing imports it."""
