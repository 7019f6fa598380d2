"""Bytes in the cluster's object store: put on one machine, read on any; they live as long as a reference to them."""

from typing import Any

import numpy as np
import ray
import ray.exceptions

from nemo_rl.distributed.actors import connect
from nemo_rl.errors import WorkerError


def put_bytes(content: np.ndarray) -> Any:
    """A reference to a copy of `content` (uint8), which may be sent to other processes."""
    connect()
    return ray.put(content)


def get_bytes(reference: Any, timeout_s: float) -> np.ndarray:
    """What was put, read-only, without a copy on a machine that has it; raises WorkerError when it cannot be had."""
    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.RayError as error:
        raise WorkerError(f"the object store did not give what it holds: {type(error).__name__}") from error
