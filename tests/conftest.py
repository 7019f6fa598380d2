"""Shared test settings: property tests that draw the same examples in every run, and what runs side by side.

`pytest -n 2` (pytest-xdist) shares the suite between two processes by file. Of the contract tests, those that share
ranks stay together, and so do those that share engines; they begin first, since they take longest.
"""

import os
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported; what the tests start inherits it
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Only a change of the code may turn CI red; HYPOTHESIS_PROFILE=explore draws other examples each time.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.register_profile(  # for scripts/mutate, which asks only whether a test fails
    "unshrunk", derandomize=True, deadline=None, phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate)
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

CONTRACTS = "tests/contracts/"
ON_RANKS = tuple(f"{CONTRACTS}test_{name}" for name in ("distillation", "policy", "sft_loss"))
FIRST = (CONTRACTS, "tests/functional/", "tests/browser/")  # by how long they take


def unit_of_work(nodeid: str) -> str:
    """Return what runs in one process and in order: a file, or the contract tests that share ranks, or engines."""
    if nodeid.startswith(CONTRACTS):
        return "ranks" if nodeid.startswith(ON_RANKS) else "engines"
    return nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler of these units, in the order of the tests."""
    from xdist.scheduler import LoadScopeScheduling

    class ByUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of_work(nodeid)

    config.option.loadscopereorder = False
    return ByUnit(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, where tests run side by side."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: [not item.nodeid.startswith(name) for name in FIRST])
