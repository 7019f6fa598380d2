"""Metrics for Weights & Biases, with an account or without."""

import logging
import netrc
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from nemo_rl.config.run import WandbConfig

logger = logging.getLogger(__name__)

RUN_ID_FILE = "wandb_run_id"

TRAIN_STEP = "train/step"
VALIDATION_STEP = "validation/step"
STEP_METRIC_BY_PATTERN = {  # what each chart has on its x axis
    "train/*": TRAIN_STEP,
    "timing/train/*": TRAIN_STEP,
    "performance/*": TRAIN_STEP,
    "efficiency/*": TRAIN_STEP,
    "env/*": TRAIN_STEP,
    "validation/*": VALIDATION_STEP,
    "timing/validation/*": VALIDATION_STEP,
}


class WandbLogger:
    """One W&B run. Offline, under `wandb/` in the run directory, where no key is known; `wandb sync` sends it later.

    The run's id is kept in the run directory, so that a run that goes on there is one run in W&B too.
    """

    def __init__(self, section: WandbConfig, run_dir: Path, config: Mapping[str, object]) -> None:
        import wandb  # slow to import

        self._wandb = wandb
        mode = None if "WANDB_MODE" in os.environ or has_api_key() else "offline"
        is_offline = (mode or os.environ.get("WANDB_MODE")) in ("offline", "dryrun")
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            name=section.name or run_dir.name,
            tags=section.tags,
            config=dict(config),
            dir=str(run_dir),
            id=_run_id(run_dir),
            resume=None if is_offline else "allow",  # an offline run cannot ask; the same id joins at `wandb sync`
            mode=mode,
            settings=wandb.Settings(console="off", silent=True),
        )
        for pattern, step_metric in STEP_METRIC_BY_PATTERN.items():
            self._run.define_metric(pattern, step_metric=step_metric)
        where = f"offline in {run_dir / 'wandb'} (wandb leet shows it, wandb sync sends it)"
        logger.info("W&B: %s", where if is_offline else self._run.url)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**_step_metrics(metrics, step), **metrics})

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        table = self._wandb.Table(columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True)
        self._run.log({**_step_metrics([name], step), name: table})

    def close(self) -> None:
        self._run.finish()


def has_api_key() -> bool:
    """Whether WANDB_API_KEY or the netrc file holds a key for W&B's server."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    named = os.environ.get("NETRC")
    for path in [named] if named else ["~/.netrc", "~/_netrc"]:
        try:
            if netrc.netrc(os.path.expanduser(path)).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _run_id(run_dir: Path) -> str:
    path = run_dir / RUN_ID_FILE
    if not path.exists():
        path.write_text(secrets.token_hex(4))
    return path.read_text().strip()


def _step_metrics(names: Iterable[str], step: int) -> dict[str, int]:
    """The x values that these metrics are drawn over."""
    prefixes = ("validation/", "timing/validation/")
    return {VALIDATION_STEP if name.startswith(prefixes) else TRAIN_STEP: step for name in names}
