"""math-verify in processes: equality, what is no mathematics, and a comparison that hangs."""

import asyncio

import pytest

from nemo_rl.environments.math import MathEnvironment, MathEnvironmentConfig, verify_answer
from nemo_rl.environments.process_pool import ProcessPool
from nemo_rl.errors import WorkerError
from nemo_rl.types import EnvStep, Failure, FailureClass, Message


@pytest.mark.parametrize(
    ("reference", "response", "is_correct", "answer"),
    [
        ("72", "The answer is \\boxed{72}.", True, "72"),
        ("1/2", "So it is $0.5$.", True, "0.5"),
        ("\\frac{1}{2}", "\\boxed{\\frac{2}{4}}", True, "\\frac{2}{4}"),
        ("$x^2 + 1$", "\\boxed{1 + x^2}", True, "1 + x^2"),
        ("4 + 3 = 7\n#### 7", "7", True, "7"),
        ("72", "The answer is \\boxed{71}.", False, "71"),
        ("72", "I do not know", False, None),
    ],
)
def test_answers_equal_as_mathematics(reference: str, response: str, is_correct: bool, answer: str | None) -> None:
    correct, extracted = verify_answer(reference, response)
    assert correct is is_correct
    if answer in ("0.5", None):
        assert (extracted is None) == (answer is None)
    else:
        assert extracted == answer


def test_reference_that_is_no_mathematics_raises() -> None:
    with pytest.raises(ValueError, match="is not mathematics"):
        verify_answer("", "\\boxed{1}")


def test_environment_scores_a_batch_and_fails_items_alone() -> None:
    section = MathEnvironmentConfig.model_validate({"num_workers": 1, "verify_timeout_s": 60})
    items = [("72", "\\boxed{72}"), ("72", "\\boxed{7}"), (None, "\\boxed{1}"), ("", "\\boxed{1}")]

    async def main() -> list[EnvStep | Failure]:
        environment = MathEnvironment("math", section)
        try:
            conversations = [(Message("user", "?"), Message("assistant", text)) for _, text in items]
            states = [{} if answer is None else {"answer": answer} for answer, _ in items]
            return list(await environment.step(conversations, states))
        finally:
            await environment.close()

    right, wrong, no_answer, no_mathematics = asyncio.run(main())
    assert right == EnvStep(rewards={"math": 1.0}, state={"answer": "72"}, answer="72")
    assert wrong == EnvStep(rewards={"math": 0.0}, state={"answer": "72"}, answer="7")
    assert isinstance(no_answer, Failure)
    assert no_answer.failure_class is FailureClass.REWARD
    assert isinstance(no_mathematics, Failure)
    assert "is not mathematics" in no_mathematics.cause


def hang_or_die(what: str) -> str:
    """Runs in the pool's processes."""
    if what == "hang":
        while True:
            pass
    if what == "die":
        import os

        os._exit(1)
    if what == "raise":
        raise KeyError("lost")
    return what


def test_worker_that_hangs_dies_or_raises_fails_its_call_alone() -> None:
    async def main() -> list[object]:
        pool = ProcessPool(f"{__name__}:{hang_or_die.__name__}", 1, timeout_s=10.0)
        calls = [pool.call(what) for what in ("a", "hang", "b", "die", "c", "raise", "d")]
        try:
            return list(await asyncio.gather(*calls, return_exceptions=True))
        finally:
            await pool.close()

    results = asyncio.run(main())
    assert results[0::2] == ["a", "b", "c", "d"]
    assert all(isinstance(error, WorkerError) for error in results[1::2])
    assert "did not finish in 10 s" in str(results[1])
    assert "its process died" in str(results[3])
    assert "KeyError: 'lost'" in str(results[5])
