import pytest

from nemo_rl.distributed import machine as ports


@pytest.fixture
def unused_port() -> int:
    """A port that nobody listens on now."""
    return ports.unused_port()
