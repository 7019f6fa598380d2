"""Verifiers of final answers as text: the last "Answer: ..." of a response, or its letter."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
ANSWER_WORDS = "answer|antwort|réponse|respuesta|risposta|resposta|jawaban|đáp án|ответ|答案|答え|정답|답"
ANSWER_LETTER = re.compile(rf"(?:{ANSWER_WORDS})\s*[:：][\s*$({{]*([A-Z])\b", re.IGNORECASE)
ANSWER_TAIL = 300  # characters at the end of a response that may hold the answer, as in DAPO
TAGGED_START, TAGGED_MIDDLE, TAGGED_END = "<think>", "</think>\n<answer>", "</answer>"
UNITS = re.compile(
    r"\b(?:square|ways|integers|dollars|mph|inches|hours|km|units|points|feet|minutes|digits|cents|degrees|cm|gm|pounds"
    r"|meters|meals|edges|students|multiples)\b"
)
TEXT_COMMAND = re.compile(r"\\(?:text|mbox|mathrm)\{([^{}]*)\}")
SPACING = re.compile(r"\\[,;!: $]|\^\{?\\circ\}?|\{,\}|[$\s\"]")


def normalize_answer(text: str) -> str:
    """Return an answer without its left side, units, spacing and LaTeX's text commands.

    Example: "x = 1,234 \\text{ cm}." becomes "1234".
    """
    text = TEXT_COMMAND.sub(r"\1", text.rpartition("=")[2].strip().rstrip("."))
    text = SPACING.sub("", UNITS.sub("", text)).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = re.sub(r"frac(\w)(\w)", r"frac{\1}{\2}", text)
    text = re.sub(r"sqrt(\w)", r"sqrt{\1}", text)
    return text.replace(",", "") if text.replace(",", "").isdigit() else text


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
