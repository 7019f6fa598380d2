"""Shared test settings: property tests that draw the same examples in every run, and what runs side by side.

`pytest -n 2` (pytest-xdist) shares the suite between two processes by file. Of the contract tests, those that use the
shared ranks stay together, and so do those that use the shared engines, or the shared server; they begin first, since
they take longest.
"""

import gc
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported; what the tests start inherits it
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

from nemo_rl.ray_environment import set_ray_variables

set_ray_variables()  # before a test imports Ray
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Only a change of the code may turn CI red; HYPOTHESIS_PROFILE=explore draws other examples each time.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.register_profile(  # for scripts/mutate, which asks only whether a test fails
    "unshrunk", derandomize=True, deadline=None, phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate)
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

ROOT = Path(__file__).parents[1]
CONTRACTS = "tests/contracts/"
SHARED = {  # by what the tests of a file ask for (tests/contracts/conftest.py): started once if they run in one process
    "ranks": re.compile(r"\b(run: Layouts|pool: RankPool)\b"),
    "engines": re.compile(r"\bengines: Any\b"),
    "server": re.compile(r"\bserved_url\b"),
}
# Unit tests that start processes, serve HTTP, compile or wait; `scripts/test --fast` leaves them out.
HEAVY = {
    "tests/unit/": ("distributed/", "jobs/", "test_bad_commands", "test_bad_keys", "test_leaves", "test_malformed_http",
                    "test_mutations", "test_web"),
    "tests/unit/algorithms/": ("test_interrupt",),
    "tests/unit/compat/": ("test_removal",),
    "tests/unit/data/": ("test_reasoning_gym_rows",),
    "tests/unit/docs/": ("test_commands",),
    "tests/unit/environments/": ("nemo_gym/", "test_math_answers", "test_process_pool", "test_reasoning_gym.",
                                 "test_registry_remote", "test_sandbox", "test_user_code"),
    "tests/unit/experience/": ("test_agents", "test_async_schedules", "test_nemo_gym_rollouts",
                               "test_reward_integrity"),
    "tests/unit/gateway/": ("test_conversations", "test_many_sessions"),
    "tests/unit/generation/": ("test_vllm_parsers",),
    "tests/unit/launch/": ("test_collection.", "test_distillation", "test_memory_ledger", "test_quickstart",
                           "test_rollouts", "test_teachers", "test_training."),
    "tests/unit/observability/": ("test_loggers",),
    "tests/unit/policy/": ("fsdp2/", "test_log_softmax", "test_memory"),
    "tests/unit/weight_sync/": ("test_shared_memory", "test_verification"),
}  # fmt: skip
IS_HEAVY = tuple(directory + name for directory, names in HEAVY.items() for name in names)
FIRST = (CONTRACTS, "tests/functional/", "tests/browser/")  # by how long they take


def unit_of_work(nodeid: str) -> str:
    """Return what runs in one process and in order: a file, or the contract tests that share what `SHARED` names."""
    file = nodeid.partition("::")[0]
    return _shared_part(file) if file.startswith(CONTRACTS) else file


@cache
def _shared_part(file: str) -> str:
    """Return the name of what the file's tests share with those of others, the file itself if there is nothing."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return next((name for name, pattern in SHARED.items() if pattern.search(text)), file)


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
    """Mark heavy unit tests, and begin with what takes longest if tests run side by side."""
    for item in items:
        if item.nodeid.startswith(IS_HEAVY):
            item.add_marker("heavy")
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: [not item.nodeid.startswith(name) for name in FIRST])


def pytest_collection_finish() -> None:
    """Exempt what imports and the collection made from garbage collection, as a run does; saves a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
