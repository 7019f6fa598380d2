"""Harnesses as they come, by their entries in examples/agents/harnesses: what they made the policy say is trained."""

import asyncio

import pytest

from tests.support.harness_sessions import INSTALLED, NAMES, find_harness, run_session

DEADLINE_S = 180.0


@pytest.mark.parametrize("name", NAMES)
def test_a_harness_runs_the_policys_command_and_every_token_is_trained_once(name: str) -> None:
    program = find_harness(name)
    if program is None:
        pytest.skip(f"{name} is not installed, neither in PATH nor in ${INSTALLED} (scripts/acceptance/harnesses.py)")
    seen = asyncio.run(asyncio.wait_for(run_session(name, program), DEADLINE_S))
    assert seen.error == ""
    assert seen.has_read
    assert seen.rewritten == 0
    assert set(seen.untrained) <= {"A title"}
