"""The calculator."""

import pytest

from nemo_rl.environments.calculator import calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 * (3 + 4)", "14"),
        ("7 / 2", "3.5"),
        ("7 // 2 - -1", "4"),
        ("2^10", "1024"),
        ("2 ** -1", "0.5"),
        ("sqrt(16) + max(1, 2, 3)", "7"),
        ("gcd(12, 18) * round(2.6)", "18"),
        ("round(3.14159, 2)", "3.14"),
        ("2 * pi", "6.28318530718"),
        ("9 ** 99", str(9**99)),
        (" 0.1 + 0.2 ", "0.3"),
        ("-" * 101 + "1", "-1"),
    ],
)
def test_value_of_an_expression(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("9 ** 9 ** 9", "too large"),
        ("9 ** 9 ** 9 ** 9", "too large"),
        ("10 ** 1000 * 10 ** 1000", "too large"),
        ("1e308 * 10", "too large"),
        ("exp(1000)", "range"),
        ("round(5, -1000000000)", "at most 15 digits"),
        ("1 / 0", "division by zero"),
        ("(-8) ** 0.5", "complex"),
        ("__import__('os')", "not arithmetic"),
        ("().__class__", "not arithmetic"),
        ("[1] * 10", "not arithmetic"),
        ("'a' * 10", "not arithmetic"),
        ("True + 1", "not arithmetic"),
        ("x + 1", "not arithmetic"),
        ("sqrt()", "argument"),
        ("sqrt(-1)", "math domain error|nonnegative"),
        ("1 +", "not an expression"),
        ("", "not an expression"),
        ("1" * 501, "longer than 500"),
        ("(" * 400, "too many nested|not an expression"),
    ],
)
def test_what_is_refused_raises_value_error(expression: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        calculate(expression)
