"""The environment `math`."""

import asyncio

import pytest

from nemo_rl.environments.math_answers import MathEnvironment, MathEnvironmentConfig, verify_answer
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


def verify_all(items: list[tuple[str | None, str]], **keys: object) -> list[EnvStep | Failure]:
    section = MathEnvironmentConfig.model_validate({"num_workers": 1, **keys})

    async def main() -> list[EnvStep | Failure]:
        environment = MathEnvironment("math", section)
        try:
            conversations = [(Message("user", "?"), Message("assistant", text)) for _, text in items]
            states = [{} if answer is None else {"answer": answer} for answer, _ in items]
            return list(await environment.step(conversations, states))
        finally:
            await environment.close()

    return asyncio.run(main())


def test_environment_scores_a_batch_and_fails_items_alone() -> None:
    items = [("72", "\\boxed{72}"), ("72", "\\boxed{7}"), (None, "\\boxed{1}"), ("", "\\boxed{1}")]
    right, wrong, no_answer, no_mathematics = verify_all(items)
    assert right == EnvStep(rewards={"math": 1.0}, state={"answer": "72"}, answer="72")
    assert wrong == EnvStep(rewards={"math": 0.0}, state={"answer": "72"}, answer="7")
    assert isinstance(no_answer, Failure)
    assert no_answer.failure_class is FailureClass.REWARD
    assert isinstance(no_mathematics, Failure)
    assert "is not mathematics" in no_mathematics.cause


@pytest.mark.parametrize("response", ["\\boxed{(10^{9})!}", "\\boxed{" + "(" * 3000 + "}", "$9^{9^{9^{9}}}$"])
def test_response_that_its_verifier_cannot_finish_is_wrong(response: str) -> None:
    bomb, right = verify_all([("72", response), ("72", "\\boxed{72}")], verify_timeout_s=1)
    assert isinstance(bomb, EnvStep)
    assert bomb.rewards == {"math": 0.0}
    assert bomb.response_fault in (None, "verifier_timeout", "verifier_error", "verifier_crash")
    assert isinstance(right, EnvStep)
    assert right.rewards == {"math": 1.0}


def test_response_faults_are_named() -> None:
    (bomb,) = verify_all([("72", "\\boxed{(10^{9})!}")], verify_timeout_s=1)
    assert isinstance(bomb, EnvStep)
    assert bomb.response_fault == "verifier_timeout"
