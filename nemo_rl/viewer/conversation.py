"""A rollout as people read it: turns with folded thinking and tools, histories of an agent, coloured tokens.

Whatever a model, an environment or a file says is text here: control and bidirectional characters become visible marks,
and long texts are cut into pages.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

MAX_SHOWN_CHARS = 20_000  # longest part of a message on a page; a link shows the rest
TEXT_PAGE_CHARS = 100_000
SNIPPET_CHARS = 400
TOKENS_PER_PAGE = 2000
SHORT_CHARS = 600  # a message up to this length is unfolded whoever says it
TARGET_KEYS = ("answer", "ground_truth", "expected_answer", "target", "expected", "solution", "label", "output")
COLOURS = ("policy", "engine", "difference", "advantage", "mask")

SCALES = {"difference": 0.02, "advantage": 0.5}  # width of a shade

Chain: TypeAlias = list[Mapping[str, Any]]
_SPECIAL = re.compile(r"<[|/]?[\w|:-]+[|]?>|\[[A-Z_]+\]")  # as <|im_end|>, </s>, [PAD]
_THINKING = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)
# C0 except tab and newline, C1, and what reorders or hides text.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def show(text: str) -> str:
    """Return text in which no character acts on the text around it.

    Example: an escape character becomes "␛", a right-to-left override "⟨U+202E⟩".
    """
    return _HIDDEN.sub(_mark, text)


def _mark(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"


def chains_of(row: Mapping[str, Any]) -> list[Chain]:
    """Return the message lists of a rollout: its main history, then the others of an agent."""
    others = row.get("other_chains")
    chains = [row.get("messages"), *(others if isinstance(others, list) else [])]
    return [
        [message for message in chain if isinstance(message, dict)] for chain in chains if isinstance(chain, list)
    ] or [[]]


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message, also of one with a list of parts; thinking is in tags."""
    parts = message.get("parts")  # records of collections keep parts if they hold more than the content
    content = parts if isinstance(parts, list) else message.get("content")
    if isinstance(content, list):
        return _join_parts(content)
    return content if isinstance(content, str) else "" if content is None else to_text(content)


def _join_parts(parts: Sequence[object]) -> str:
    """Return the texts of parts as `Message.content` joins them, with a line break after thinking."""
    said, is_after_thinking = "", False
    for part in parts:
        if text := _part_text(part):
            said += f"\n{text}" if is_after_thinking else text
            is_after_thinking = isinstance(part, dict) and part.get("type") == "thinking"
    return said


def _part_text(part: object) -> str:
    if not isinstance(part, dict):
        return to_text(part)
    if part.get("type") == "tool_call":
        return ""  # shown with the calls
    if part.get("type") == "image" and "digest" in part:
        return f"[image {str(part['digest'])[:12]}]"
    if isinstance(part.get("content"), list):
        return _join_parts(part["content"])
    if part.get("type") == "thinking":
        return f"<think>{part.get('text') or part.get('thinking') or ''}</think>"
    text = part.get("text")
    return text if isinstance(text, str) else to_text(part)


def images_of(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the parts of a message that are images, those in results of tools included."""
    parts = message.get("parts")
    found: list[Mapping[str, Any]] = []
    for part in parts if isinstance(parts, list) else ():
        inner = part.get("content") if isinstance(part, dict) else None
        found += (one for one in (inner if isinstance(inner, list) else [part]) if _is_image(one))
    return found


def _is_image(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "image" and isinstance(part.get("digest"), str)


def to_text(value: object) -> str:
    """Return any value of a file as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)


def turns_of(chain: Chain) -> list[dict[str, Any]]:
    """Return the messages of a history with their parts: text, thinking (folded), tool calls (folded)."""
    turns = []
    for number, message in enumerate(chain):
        role = str(message.get("role", "?"))
        text = message_text(message)
        parts = (
            [_clip(kind, part) for kind, part in _split_thinking(text)]
            if role == "assistant"
            else [_clip("text", text)]
        )
        calls = message.get("tool_calls")
        turns.append(
            {
                "number": number,
                "role": role if role in ("system", "user", "assistant", "tool", "environment") else "other",
                "label": show(" ".join(filter(None, (role, message.get("policy")))))[:40],
                "parts": [part for part in parts if part["text"]],
                "images": list(dict.fromkeys(image["digest"] for image in images_of(message))),
                "length": len(text),
                "searched": "".join(part["text"] for part in parts).lower(),
                "is_cut": any(part["hidden"] for part in parts),
                "calls": [_call(call) for call in calls if isinstance(call, dict)] if isinstance(calls, list) else [],
                "call_id": show(str(message["tool_call_id"])) if message.get("tool_call_id") else "",
                "is_folded": len(text) > SHORT_CHARS
                and (role in ("tool", "system") or (role == "user" and number > 1)),
                "versions": [
                    str(span[0]) for span in message.get("weight_spans") or [] if isinstance(span, list) and span
                ],
            }
        )
    return turns


def _call(call: Mapping[str, Any]) -> dict[str, str]:
    function = call.get("function")
    inner = function if isinstance(function, dict) else call
    return {
        "name": show(str(inner.get("name", "?"))),
        "arguments": show(to_text(inner.get("arguments", "")))[:MAX_SHOWN_CHARS],
    }


def _split_thinking(text: str) -> list[tuple[str, str]]:
    parts, at = [], 0
    for match in _THINKING.finditer(text):
        parts += [("text", text[at : match.start()]), ("thinking", match[1])]
        at = match.end()
    return [(kind, part.strip("\n")) for kind, part in [*parts, ("text", text[at:])]]


def _clip(kind: str, text: str) -> dict[str, Any]:
    return {"kind": kind, "text": show(text[:MAX_SHOWN_CHARS]), "hidden": max(0, len(text) - MAX_SHOWN_CHARS)}


def prompt_text(row: Mapping[str, Any], *, limit: int = SNIPPET_CHARS) -> str:
    """Return the beginning of the last message before the first answer."""
    asked = ""
    for message in chains_of(row)[0]:
        if message.get("role") == "assistant":
            break
        asked = message_text(message)
    return show(asked[:limit]) + ("…" if len(asked) > limit else "")


def final_text(row: Mapping[str, Any], *, limit: int = 1500) -> str:
    """Return the end of the last answer."""
    answers = [m for m in chains_of(row)[0] if m.get("role") == "assistant"]
    text = message_text(answers[-1]) if answers else ""
    return ("…" if len(text) > limit else "") + show(text[-limit:])


def split_answer(text: str) -> tuple[str, str]:
    """Return the thinking in a text, and the rest."""
    parts = _split_thinking(text)
    thinking, rest = (
        "\n".join(part for kind, part in parts if kind == wanted and part) for wanted in ("thinking", "text")
    )
    return thinking, rest


def answer_text(row: Mapping[str, Any], *, limit: int) -> str:
    """Return the beginning of all that the assistant says, messages apart by a line."""
    answers = [message_text(m) for m in chains_of(row)[0] if m.get("role") == "assistant"]
    text = "\n".join(answers)
    return show(text[:limit]) + ("…" if len(text) > limit else "")


def target_of(row: Mapping[str, Any], *, limit: int = SNIPPET_CHARS) -> str:
    """Return the expected answer among the environment's data of a row; "" if there is none of a usual name."""
    state = row.get("env_state")
    for values in (state, *(state.values() if isinstance(state, dict) else ())):  # NeMo Gym's row is one level below
        if isinstance(values, dict):
            for name in TARGET_KEYS:
                if values.get(name) not in (None, ""):
                    text = to_text(values[name])
                    return show(text[:limit]) + ("…" if len(text) > limit else "")
    return ""


def histories(chains: Sequence[Chain]) -> list[dict[str, Any]]:
    """Return the tree of an agent's histories: of each the earlier one with which it shares most messages.

    Example: the second history repeats three messages of the first and goes another way: parent 0, shared 3.
    """
    tree: list[dict[str, Any]] = []
    for number, chain in enumerate(chains):
        shared = [_num_shared(chains[other], chain) for other in range(number)]
        parent = max(range(number), key=lambda other: shared[other], default=None)
        if parent is not None and not shared[parent]:
            parent = None
        depth = 0 if parent is None else tree[parent]["depth"] + 1
        tree.append(
            {
                "number": number,
                "parent": parent,
                "shared": 0 if parent is None else shared[parent],
                "length": len(chain),
                "depth": min(depth, 6),
            }
        )
    return tree


def _num_shared(first: Chain, second: Chain) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def colour_tokens(details: Mapping[str, Any], colour: str, *, start: int = 0) -> dict[str, Any]:
    """Return a page of tokens with a class of colour each, and their numbers.

    Classes t0 to t9 go from likely to unlikely, n1 to n4 and p1 to p4 from small to large negative and positive
    values; "sampled" and "context" tell the mask.
    """
    texts, mask = details.get("text") or [], str(details.get("mask") or "")
    columns = {name: details.get(f"{name}_logprobs") or [] for name in ("policy", "engine")}
    advantages, constant = details.get("advantages") or [], details.get("advantage")
    sampled, tokens = mask[:start].count("1"), []
    for text, bit in zip(texts[start : start + TOKENS_PER_PAGE], mask[start:], strict=False):
        token: dict[str, Any] = {"text": _show_token(str(text)), "kind": "context", "title": "not sampled"}
        token["is_special"] = bool(_SPECIAL.fullmatch(str(text)))
        if bit == "1":
            values = {name: _at(column, sampled) for name, column in columns.items()}
            values["advantage"] = _at(advantages, sampled) if advantages else constant
            policy, engine = values["policy"], values["engine"]
            values["difference"] = None if policy is None or engine is None else policy - engine
            token["kind"] = "sampled" if colour == "mask" else _shade(colour, values.get(colour))
            token["title"] = ", ".join(f"{name} {value:.4g}" for name, value in values.items() if value is not None)
            sampled += 1
        tokens.append(token)
    end = start + len(tokens)
    return {"tokens": tokens, "start": start, "end": end, "total": len(texts), "step": TOKENS_PER_PAGE}


def _at(values: Sequence[Any], index: int) -> float | None:
    value = values[index] if index < len(values) else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _show_token(text: str) -> str:
    """Return the text of a token; line breaks and tabs have a mark before them, an empty token is a mark."""
    return show(text).replace("\n", "↵\n").replace("\t", "⇥\t") or "␃"


def colour_scale(colour: str) -> list[tuple[str, str]]:
    """Return the classes that `colour_tokens` gives for a colour, each with the values that it stands for."""
    if colour in ("policy", "engine"):
        levels = [("t0", "above -0.5"), *((f"t{n}", f"{-n / 2:g} to {-n / 2 - 1:g}") for n in (1, 3, 5, 7))]
        return [*levels, ("t9", "below -4.5"), ("unknown", "unknown")]
    if colour == "mask":
        return [("sampled", "sampled: trained on"), ("context", "given")]
    unit = SCALES[colour]
    negative = [(f"n{n}", f"{-n * unit:g} to {-(n - 1) * unit:g}") for n in (3, 2, 1)]
    positive = [(f"p{n}", f"{(n - 1) * unit:g} to {n * unit:g}") for n in (1, 2, 3)]
    ends = [("n4", f"below {-3 * unit:g}")], [("p4", f"above {3 * unit:g}")]
    return [*ends[0], *negative, ("t0", "0"), *positive, *ends[1], ("unknown", "unknown")]


def _shade(colour: str, value: float | None) -> str:
    if value is None:
        return "unknown"
    if colour in ("policy", "engine"):
        return f"t{min(9, int(-value * 2))}" if value <= 0 else "t0"
    level = min(4, int(abs(value) / SCALES[colour] + 0.999)) if value else 0
    return f"{'p' if value > 0 else 'n'}{level}" if level else "t0"
