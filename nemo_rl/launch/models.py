"""Model resolution: from `policy.model_name` to files that transformers loads; trains the quickstart's models on first
use."""

import asyncio
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_rl.distributed.machine import cache_directory
from nemo_rl.launch.model_files import checkpoint_weights, quickstart_model
from nemo_rl.observability.console import check_writable
from nemo_rl.quickstart import models as quickstart
from nemo_rl.quickstart.pictures import save_model

logger = logging.getLogger(__name__)

COMPLETE_MARKER = "complete"  # file that marks a complete directory; holds the recipe of its weights
VISION_MODEL_VERSION = "1"  # changes with the weights that a seed gives

RECIPES = {
    "quickstart": quickstart.student,
    "quickstart-moe": quickstart.experts,
    "quickstart-teacher": quickstart.teacher,
    "quickstart-pairs-teacher": quickstart.pairs_teacher,
}


async def prepare_model(
    directory: Path, recipe: quickstart.Recipe, *, on_step: quickstart.OnStep | None = None
) -> Path:
    """Make `directory` a Hugging Face model with tokenizer and chat template; a complete one is kept.

    Takes half a minute on two CPU cores. The directory appears atomically, also when several processes make it. When
    cancelled, training stops after the current step and the directory is not created.
    """
    if _is_made(directory, recipe.text):
        return directory
    with _scratch_beside(directory) as scratch:
        logger.info("training the quickstart model in %s (half a minute, once)", directory)
        from nemo_rl.launch.quickstart_training import train_in_thread  # here: most starts train none

        made = await train_in_thread(recipe, scratch, on_step=on_step)
        _move_into_place(made, directory, recipe.text)
    return directory


def _prepare_vision_model(directory: Path, seed: int) -> Path:
    """Make `directory` the quickstart's model that sees; a complete one is kept."""
    recipe = f"{VISION_MODEL_VERSION}, seed {seed}"
    if _is_made(directory, recipe):
        return directory
    with _scratch_beside(directory) as scratch:
        save_model(scratch / "made", seed)
        _move_into_place(scratch / "made", directory, recipe)
    return directory


def _is_made(directory: Path, recipe: str) -> bool:
    """Return whether the directory is complete, with the weights of this recipe."""
    marker = directory / COMPLETE_MARKER
    return marker.is_file() and marker.read_text() == recipe


@contextmanager
def _scratch_beside(directory: Path) -> Iterator[Path]:
    """Make a directory on the same disk, for the block."""
    check_writable("NEMO_RL_CACHE", directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        yield Path(scratch)


def _move_into_place(made: Path, directory: Path, recipe: str) -> None:
    """Mark as complete and rename, replacing the model of another recipe; what a faster process made is kept."""
    if _is_made(directory, recipe):
        return
    (made / COMPLETE_MARKER).write_text(recipe)
    if directory.exists():
        shutil.rmtree(directory)
    try:
        os.rename(made, directory)
    except OSError:
        if not (directory / COMPLETE_MARKER).is_file():
            raise


async def resolve_model(model_name: str, *, key: str = "policy.model_name") -> str:
    """Return the path or hub name to load, with its tokenizer; for a run's checkpoint `step_N`, the model in it.

    The quickstart's models are made on first use, in half a minute.
    """
    parsed = quickstart_model(key, model_name)
    if parsed is None:
        return str(checkpoint_weights(model_name) or model_name)
    kind, seed = parsed
    if kind == "quickstart-vision":
        return str(await asyncio.to_thread(_prepare_vision_model, cache_directory() / f"{kind}-{seed}", seed))
    return str(await prepare_model(cache_directory() / f"{kind}-{seed}", RECIPES[kind](seed)))
