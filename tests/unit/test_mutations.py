"""Every mutation of scripts/mutations.yaml applies to the present sources, and has unit tests that must notice it."""

import importlib
import importlib.util
import re
import sys
from collections import Counter
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from nemo_rl.policy.micro_batches import expected_optimizer_steps

ROOT = Path(__file__).parents[2]
TEST = re.compile(r"^(?:async )?def (test_\w+)\(", re.MULTILINE)


def load_gate() -> ModuleType:
    loader = SourceFileLoader("mutate", str(ROOT / "scripts" / "mutate"))
    spec = importlib.util.spec_from_loader("mutate", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = module  # its dataclasses look there
    loader.exec_module(module)
    return module


GATE = load_gate()
MUTATIONS = GATE.load_mutations()
AREAS = (  # and the least number of mutations in each
    ("losses", 60),
    ("losses.policy_gradient:weighted_kl", 3),
    ("losses.policy_gradient:sampling_weights", 5),
    ("losses.policy_gradient:engine_mismatch_metrics", 4),
    ("losses.policy_gradient:loss_metrics", 5),
    ("algorithms.advantages", 25),
    ("algorithms.grpo", 15),
    ("algorithms.grpo:sequence_logprob_errors", 2),
    ("algorithms.reward_penalties", 5),
    ("experience.assembly", 10),
    ("experience.pass_at_k", 5),
    ("experience.replay_buffer", 8),
    ("gateway.sessions", 10),
    ("policy.micro_batches", 8),
    ("policy.packing", 7),
    ("weight_sync", 10),
    ("checkpoint:CheckpointStore._apply_retention", 3),
)


def test_mutations_apply_and_have_tests() -> None:
    """A change of the sources may leave a few behind; scripts/mutate itself refuses to run with any."""
    stale = []
    for mutation in MUTATIONS:
        try:
            module, path, source = GATE.apply(mutation)
        except GATE.StaleMutationError as error:
            stale.append(str(error))
            continue
        assert source != path.read_text(encoding="utf-8"), mutation.title
        assert all((ROOT / test).exists() for test in GATE.tests_of(module)), mutation.title
    assert len(stale) <= len(MUTATIONS) // 20, stale


def test_the_list_covers_every_area_without_repeating_itself() -> None:
    assert len(MUTATIONS) >= 150
    assert Counter(m.title for m in MUTATIONS).most_common(1)[0][1] == 1
    for area, least in AREAS:
        assert sum(m.function.startswith(f"nemo_rl.{area}") for m in MUTATIONS) >= least, area


def test_every_mutation_is_killed_by_a_test_or_has_a_reason() -> None:
    names = {
        name for file in (ROOT / "tests/unit").rglob("test_*.py") for name in TEST.findall(file.read_text("utf-8"))
    }
    renamed = []
    for mutation in MUTATIONS:
        if mutation.equivalent is not None:
            assert mutation.killed_by is None, mutation.title
            assert len(mutation.equivalent.split()) >= 5, mutation.title
            continue
        assert mutation.killed_by is not None, f"not run, or survived: {mutation.title}"
        if mutation.killed_by.partition("::")[2] not in names:
            renamed.append(mutation.killed_by)
    assert len(renamed) <= len(MUTATIONS) // 20, renamed


def test_a_function_that_moved_is_found_and_a_text_that_is_gone_is_an_error() -> None:
    moved = GATE.Mutation("nemo_rl.losses.elsewhere:clipped_surrogate", ".maximum(", ".minimum(")
    assert GATE.apply(moved)[0] == "nemo_rl.losses.surrogates"
    with pytest.raises(GATE.StaleMutationError, match="occurs 0 times"):
        GATE.apply(GATE.Mutation("nemo_rl.losses.surrogates:clipped_surrogate", "not there", ""))
    with pytest.raises(GATE.StaleMutationError, match="no such function"):
        GATE.apply(GATE.Mutation("nemo_rl.losses.surrogates:no_such_function_at_all", "x", "y"))


def test_an_installed_mutation_changes_the_function_that_others_have_imported() -> None:
    original = expected_optimizer_steps.__code__
    assert expected_optimizer_steps(17, 10) == 2
    try:
        GATE.install(GATE.Mutation("nemo_rl.policy.micro_batches:expected_optimizer_steps", "+ 0.5", "+ 0.0"))
        assert expected_optimizer_steps(17, 10) == 1
    finally:
        expected_optimizer_steps.__code__ = original


def test_functions_are_found_under_their_decorators() -> None:
    module = importlib.import_module("nemo_rl.algorithms.advantages")
    assert GATE.find_function(module, "batch_metrics").__name__ == "batch_metrics"
    assert GATE.find_function(module, "TrajectoryIndex.of").__name__ == "of"
    assert GATE.find_function(module, "DecoupledAdvantages.required_keys").__name__ == "required_keys"
