"""Verifiers of final answers as text: the last "Answer: ..." of a response, or its letter."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
ANSWER_WORDS = "answer|antwort|réponse|respuesta|risposta|resposta|jawaban|đáp án|ответ|答案|答え|정답|답"
ANSWER_LETTER = re.compile(rf"(?:{ANSWER_WORDS})\s*[:：][\s*$({{]*([A-Z])\b", re.IGNORECASE)
ANSWER_TAIL = 300  # characters at the end of a response that may hold the answer, as in DAPO
TAGGED_START, TAGGED_MIDDLE, TAGGED_END = "<think>", "</think>\n<answer>", "</answer>"
# What does not count in a final answer, by DAPO's verifier (arXiv:2503.14476), which has it from Minerva
# (arXiv:2206.14858). Applied in this order and anywhere in the text, each to what the ones before left.
REPLACEMENTS = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
REMOVED_UNITS = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples"),
)
REMOVED_LATEX = (
    *("\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}"),
    *("\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
# Commands of which the argument remains: up to its first closing brace, \boxed up to the last one of the line.
UNWRAPPED = (
    *(re.compile(rf"\\{name}\{{([^}}\n]*)\}}") for name in ("text", "textbf", "overline")),
    re.compile(r"\\boxed\{(.*)\}"),
)
BRACELESS = ((re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"), (re.compile(r"sqrt([^{])"), r"sqrt{\1}"))


def normalize_answer(text: str) -> str:
    """Return an answer without its left side, units, spaces and LaTeX's text commands, as DAPO's verifier does.

    Example: "x = $1,234 \\text{ cm}$" becomes "1234"; "\\boxed{\\frac12}" becomes "\\frac{1}{2}".
    """
    text = text.rpartition("=")[2]
    for old, new in (*REPLACEMENTS, *((removed, "") for removed in (*REMOVED_UNITS, *REMOVED_LATEX))):
        text = text.replace(old, new)
    text = "\n".join(map(_keep_formula, text.split("\n")))
    for command in UNWRAPPED:
        text = command.sub(r"\1", text)
    for shorthand, written_out in BRACELESS:
        text = shorthand.sub(written_out, text)
    text = text.replace("$", "")
    without_commas = text.replace(",", "")
    return (without_commas if without_commas.isdigit() else text).strip()


def _keep_formula(line: str) -> str:
    """Return the first formula of a line, with its dollar signs; the line if it has none."""
    parts = line.split("$", 2)
    return f"${parts[1]}$" if len(parts) == 3 else line


def verify_last_answer(reference: str, response: str) -> tuple[bool, str | None]:
    """Return whether the last "Answer: ..." at the end of the response is the reference, both normalised; and it."""
    found = ANSWER_LINE.findall(response[-ANSWER_TAIL:])
    answer = normalize_answer(found[-1]) if found else None
    return answer is not None and answer == normalize_answer(reference), answer


def verify_choice(reference: str, response: str) -> tuple[bool, str | None]:
    """Return whether the letter after the first "Answer:" is the reference; and that letter."""
    found = ANSWER_LETTER.search(response)
    letter = found.group(1).upper() if found else None
    return letter is not None and letter == reference.strip().upper(), letter


def score_tagged_answer(messages: Sequence[Mapping[str, Any]], state: Mapping[str, Any]) -> dict[str, float]:
    """Return three rewards of a response `<think>...</think>`, then `<answer>...</answer>` on the next line.

    `correctness`: the text in the tags is the reference; `integer`: it is digits alone; `format`: the response is of
    this form. An environment of type "nemo_rl.environments.final_answers:score_tagged_answer".
    """
    response = str(messages[-1]["content"])
    answer = response.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    is_once = response.count("<answer>") == 1 == response.count("</answer>")
    is_tagged = response.startswith(TAGGED_START) and TAGGED_MIDDLE in response and response.endswith(TAGGED_END)
    return {
        "correctness": float(answer == str(state["answer"])),
        "integer": float(answer.isdigit()),
        "format": float(is_once and is_tagged),
    }
