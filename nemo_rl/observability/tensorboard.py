"""Metrics for TensorBoard: `tensorboard --logdir <run directory>`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path


class TensorboardLogger:
    """Scalars by step, tables as Markdown text, the configuration as text at step 0; in `tensorboard/`."""

    def __init__(self, run_dir: Path, config: Mapping[str, object]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._writer = SummaryWriter(str(run_dir / "tensorboard"))
        self._writer.add_text("config", f"```json\n{json.dumps(dict(config), indent=2, default=str)}\n```", 0)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        lines = [columns, ["---"] * len(columns), *rows]
        self._writer.add_text(name, "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _cell(value: object) -> str:
    """Text that stays inside its Markdown cell."""
    text = str(value).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return text.replace("\n", "<br>")
