"""One run for all of these tests."""

from pathlib import Path

import pytest

from tests.trained_runs import write_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run directory with the checkpoints 3 (accuracy .5), 6 (.75) and 9 (.625); read it only."""
    return write_run(tmp_path_factory.mktemp("runs") / "exp_001", {3: 0.5, 6: 0.75, 9: 0.625})
