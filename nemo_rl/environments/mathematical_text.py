"""Text that third-party verifiers evaluate as Python: arithmetic and functions of mathematics, and nothing else.

Verifiers of reasoning_gym hand answers to `eval`, and to sympy's `parse_expr`, which does the same; so do rows of data.
`refuse_other_code` makes this process refuse whatever such text could do beyond mathematics, whichever verifier
evaluates it: the check comes right before Python runs the code.
"""

import sys
from types import CodeType
from typing import Any

# Names that evaluated text may use; sympy writes `Integer (2 )*Symbol ('x' )` for "2*x".
CONSTRUCTORS = "Integer Float Rational Symbol Add Mul Pow Eq Ne Lt Le Gt Ge Abs Max Min"
FUNCTIONS = (
    "sin cos tan cot sec csc asin acos atan acot asec acsc atan2 sinh cosh tanh coth sech csch asinh acosh atanh acoth"
    " asech acsch exp log ln sqrt cbrt root abs sign floor ceiling factorial binomial gamma erf erfc erfi Ei li Si Ci"
    " arcsin arccos arctan"
)
CONSTANTS = "pi oo GoldenRatio EulerGamma"
ALLOWED_NAMES = frozenset(f"{CONSTRUCTORS} {FUNCTIONS} {CONSTANTS}".split())
OWN_CODE = ("from sympy import *", "<string>")  # code that parse_expr runs to fill the names of an expression
# Modules that make classes and functions from texts of their own.
TRUSTED_CALLERS = frozenset({"collections", "dataclasses", "enum", "typing", "sympy.polys.monomials"})

refused_names: list[str] = []  # names in text that was refused, until somebody clears the list
_sympy_names = compile(*OWN_CODE, "exec").co_code


def refuse_other_code() -> None:
    """Let this process evaluate no text but mathematics from now on; it cannot be undone."""
    sys.addaudithook(_check_event)


def find_foreign_name(code: CodeType) -> str | None:
    """Return a name in compiled text that is no mathematics, or "a function" for one inside; None if there is none.

    Without attributes, functions and foreign names, code can do no more than compute.
    """
    if any(isinstance(constant, CodeType) for constant in code.co_consts):
        return "a function"
    names = (name for name in code.co_names if name not in ALLOWED_NAMES and not (len(name) == 1 and name.isalpha()))
    return next(names, None)


def _check_event(event: str, args: tuple[Any, ...]) -> None:
    """Raise PermissionError if compiled text that is not mathematics is about to run. Source: PEP 578."""
    if event != "exec":
        return
    (code,) = args
    if code.co_filename.startswith(("/", "<frozen ")):  # a module
        return
    if code.co_code == _sympy_names and code.co_names == ("sympy",):
        return
    if (name := find_foreign_name(code)) is None:
        return
    if sys._getframe(1).f_globals.get("__name__") not in TRUSTED_CALLERS:
        refused_names.append(name)
        raise PermissionError(f"a verifier evaluates mathematics alone, not {name!r}")
