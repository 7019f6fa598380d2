"""Scores of reasoning_gym's verifiers, in a process of its own that evaluates nothing but mathematics.

The verifiers' scores count; if they give a full score to answers that are wrong, a further check
refuses these.
"""

import math
import re
import signal
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from typing import Any

from nemo_rl.environments.mathematical_text import refuse_other_code, refused_names

ARITHMETIC = re.compile(r"(?!.*(?:\*\*|//))[0-9+\-*/() \t\n]*", re.DOTALL)
NUMBER = re.compile(r"[0-9]+")
HARMLESS_ANSWERS = ("0", "[0]")
# Numbers without a value, to which no distance can be told: some verifiers score it as none.
NOT_FINITE = re.compile(r"\b(?:nan|inf|infinity)j?\b", re.IGNORECASE)
TOLERANCE = 1e-4  # for a probability, as its verifier has it
EXPONENT = re.compile(r"[0-9.]+e\+?[0-9]+", re.IGNORECASE)


def make_scorer() -> Callable[[str, dict[str, Any], str], tuple[float, str | None]]:
    """Return `score_answer` for a process of its own, which from now on evaluates nothing but mathematics."""
    import reasoning_gym  # noqa: F401 - imports of all tasks evaluate code

    refuse_other_code()
    return score_answer


def score_answer(task: str, entry: dict[str, Any], answer: str) -> tuple[float, str | None]:
    """Return the task verifier's score, 0 to 1, and what the answer did to the verifier, if anything.

    An entry of a mixture ("composite") names its own task. Raises ValueError for an unknown task, and PermissionError
    for an entry that is code.
    """
    if task == "composite":
        task = entry["metadata"]["source_dataset"]
    verify = _get_verifier(task)
    refused_names.clear()
    try:
        if task in FURTHER_CHECKS and not FURTHER_CHECKS[task](answer, entry):
            return 0.0, None
        score, fault = float(verify(answer=answer, entry=entry)), None
    except Exception:  # thousands of brackets, more memory than there is  # noqa: BLE001
        score, fault = 0.0, "verifier_error"
    if refused_names:
        _check_entry_is_mathematics(task, entry, verify)
        return score, "foreign_code"
    return (0.0, "not_finite") if score > 0 and _is_not_finite(answer, entry) else (score, fault)


def _check_entry_is_mathematics(task: str, entry: dict[str, Any], verify: Any) -> None:
    """Raise PermissionError if it is the entry that the verifier may not evaluate, whatever the answer."""
    refused_names.clear()
    for harmless in HARMLESS_ANSWERS:
        verify(answer=harmless, entry=entry)
    if refused_names:
        raise PermissionError(f"the entry of task {task!r} is no mathematics: it uses {refused_names[0]!r}")


def _combines_numbers(answer: str, entry: Mapping[str, Any]) -> bool:
    """Return whether an answer is an expression of + - * / and brackets that uses each given number once."""
    numbers = sorted(map(str, entry["metadata"]["numbers"]))
    return ARITHMETIC.fullmatch(answer) is not None and sorted(NUMBER.findall(answer)) == numbers


def _is_near(answer: str, entry: Mapping[str, Any]) -> bool:
    """Return whether an answer, a decimal or a fraction, is the entry's number."""
    return abs(Fraction(answer.replace(",", "")) - Fraction(entry["answer"])) <= TOLERANCE


def _is_same_text(answer: str, entry: Mapping[str, Any]) -> bool:
    return answer.casefold() == str(entry["answer"]).casefold()


# Verifiers of version 0.1.25 that give a full score to other answers too: the numbers of an arithmetic game are read
# from the text, which misses 0x18 and 2_4; any beginning of a probability counts, so 0 always does; any text is true.
FURTHER_CHECKS: dict[str, Callable[[str, Mapping[str, Any]], bool]] = {
    "countdown": _combines_numbers,
    "puzzle24": _combines_numbers,
    "coin_flip": _is_near,
    "game_of_life_halting": _is_same_text,
}


def _is_not_finite(answer: str, entry: Mapping[str, Any]) -> bool:
    """Return whether an answer has a number without a value that the entry's own answer lacks."""
    found = NOT_FINITE.findall(answer) or [text for text in EXPONENT.findall(answer) if _overflows(text)]
    return bool(found) and NOT_FINITE.search(str(entry["answer"])) is None


def _overflows(text: str) -> bool:
    try:
        return math.isinf(float(text))
    except ValueError:  # two decimal points
        return False


@cache
def _get_verifier(task: str) -> Any:
    """Return a task's verifier; loading its data is not part of the computing time of the answer that comes first."""
    from reasoning_gym.factory import get_score_answer_fn

    left_s, _ = signal.setitimer(signal.ITIMER_PROF, 0)
    try:
        return get_score_answer_fn(task)
    finally:
        signal.setitimer(signal.ITIMER_PROF, left_s)
