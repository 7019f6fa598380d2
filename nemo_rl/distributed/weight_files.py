"""Files of weights in a machine's shared memory: where they lie, what they are called, and those of killed runs."""

import fcntl
import logging
import os
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PREFIX, SUFFIX = "nemo_rl_weights_", ".bin"

log = logging.getLogger(__name__)


def default_directory() -> Path:
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def remove_leftovers(directory: Path) -> None:
    """Remove weight files that nobody holds a lock on: their runs were killed.

    A lock rather than the process id in the name: containers that share memory do not share process ids.
    """
    for path in directory.glob(f"{PREFIX}*{SUFFIX}"):
        try:
            file = os.open(path, os.O_RDWR)
        except OSError:  # gone meanwhile, or another user's
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            log.info("removed %s, left behind by a run that was killed", path)
        except OSError:  # locked: in use
            pass
        finally:
            os.close(file)
