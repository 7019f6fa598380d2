"""The limit of open files of this process, and how many connections fit below it."""

import logging
import resource

RESERVED_FILES = 256  # for the engine, data sets, checkpoints and logs of the same process
FILES_PER_CONNECTION = 2  # an agent may live in this process too, and hold the other end
UNLIMITED = 2**20  # what is asked for where there is no hard limit: kernels have one of their own

log = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one where that is allowed; returns the limit in force."""
    soft, hard = (_finite(limit) for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    if soft >= hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    except (ValueError, OSError) as error:
        log.warning("the limit of open files stays at %d: %s", soft, error)
        return soft
    log.info("raised the limit of open files from %d to %d", soft, hard)
    return hard


def connections_below(file_limit: int) -> int:
    """How many connections may be open at once under a limit of open files; at least 1.

    Example: 1024 open files carry 384 connections.
    """
    return max(1, (file_limit - RESERVED_FILES) // FILES_PER_CONNECTION)


def _finite(limit: int) -> int:
    return UNLIMITED if limit == resource.RLIM_INFINITY else limit
