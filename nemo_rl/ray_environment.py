"""Variables that Ray reads while it is imported: set before any module, a user's too, may import it."""

import os

VARIABLES = {
    # Else Ray would build the environment of `uv run` again for every worker.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # A cluster that this process starts is for this machine alone, and listens on the loopback interface. In a cluster
    # that is joined, the address of a node is the one that it was started with.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


def set_ray_variables() -> None:
    """Set the variables that the environment of this process does not have."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
