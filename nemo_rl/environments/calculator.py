"""A calculator: arithmetic whose size is bounded before it is computed."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any, TypeAlias

Number: TypeAlias = int | float
MAX_CHARS = 500  # length of an expression
MAX_BITS = 4096  # size of an integer, 1233 digits
MAX_DIGITS = 15  # digits that rounding may ask for
CONSTANTS = {"pi": math.pi, "e": math.e}
OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitXor: operator.pow,  # ^ is a power, as on paper
}


def round_number(value: Number, digits: int = 0) -> Number:
    """Return the rounded number; raises ValueError for more digits than MAX_DIGITS."""
    if abs(digits) > MAX_DIGITS:  # Python computes the power of ten, however large
        raise ValueError(f"round to at most {MAX_DIGITS} digits")
    return round(value, digits)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "ceil": math.ceil,
    "cos": math.cos,
    "exp": math.exp,
    "floor": math.floor,
    "gcd": math.gcd,
    "lcm": math.lcm,
    "log": math.log,
    "log10": math.log10,
    "log2": math.log2,
    "max": max,
    "min": min,
    "round": round_number,
    "sin": math.sin,
    "sqrt": math.sqrt,
    "tan": math.tan,
}


def calculate(expression: str) -> str:
    """Return the value as text: an integer in full, a float to 12 digits.

    Raises ValueError for an expression that is not arithmetic, has no value, or is too large.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression is longer than {MAX_CHARS} characters")
    try:
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"not an expression: {error.msg}") from error
    except (ArithmeticError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(str(error) or type(error).__name__) from error
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _evaluate(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _check_bounds(value)
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _evaluate(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return _evaluate_binary(op, _evaluate(left), _evaluate(right))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            return _check_bounds(FUNCTIONS[name](*map(_evaluate, args)))
    raise ValueError(f"not arithmetic: {ast.unparse(node)}; functions: {', '.join(FUNCTIONS)}")


def _evaluate_binary(op: ast.operator, left: Number, right: Number) -> Number:
    is_power = isinstance(op, ast.Pow | ast.BitXor)
    # The size is bounded before the power is computed.
    if is_power and isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_BITS:
        raise ValueError("the number is too large")
    return _check_bounds(OPERATORS[type(op)](left, right))


def _check_bounds(value: Number | complex) -> Number:
    if isinstance(value, complex):
        raise ValueError("the value is a complex number")
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise ValueError("the number is too large")
    elif not math.isfinite(value):
        raise ValueError("the number is too large")
    return value
