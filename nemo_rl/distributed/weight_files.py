"""Files that carry weights to the engines of a machine: their directory, their names, and the removal of stale ones."""

import fcntl
import logging
import os
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
PREFIX, SUFFIX = "nemo_rl_weights_", ".bin"


def default_directory() -> Path:
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def remove_stale_weight_files(directory: Path) -> None:
    """Remove weight files without a lock: their runs were killed.

    A lock rather than the process id in the name: containers that share memory do not share process ids.
    """
    for path in directory.glob(f"{PREFIX}*{SUFFIX}"):
        try:
            file = os.open(path, os.O_RDWR)
        except OSError:  # already removed, or another user's
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            logger.info("removed the stale weight file %s of a killed run", path)
        except OSError:  # locked: in use
            pass
        finally:
            os.close(file)
