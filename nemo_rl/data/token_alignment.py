"""Token alignment for cross-tokenizer distillation: tokens as bytes, and spans of two tokenizations with equal text."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from nemo_rl.errors import ConfigError

SPECIAL = b"\xff"  # begins the piece of a special token, and no text in UTF-8
TURN_END = SPECIAL + SPECIAL + b"turn end"
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True, slots=True)
class Span:
    """Ranges of student and teacher tokens, start to end (exclusive), with the same bytes."""

    student_start: int
    student_end: int
    teacher_start: int
    teacher_end: int


def align(student: Sequence[bytes], teacher: Sequence[bytes]) -> tuple[Span, ...]:
    """Return the shortest spans that partition both sequences and have the same bytes on both sides.

    A token without bytes belongs to the span of the next token, at the end to the last span; a side without any
    bytes is one span. Raises ValueError unless the bytes of all pieces are equal.

    Example: pieces `ab c d` and `a b cd` give (0, 1, 0, 2) and (1, 3, 2, 3).
    """
    if b"".join(student) != b"".join(teacher):
        raise ValueError("the two sides stand for different bytes")
    student_ends, teacher_ends = _token_counts_by_end(student), _token_counts_by_end(teacher)
    shared = sorted(student_ends.keys() & teacher_ends.keys())
    boundaries = [(0, 0), *((student_ends[end], teacher_ends[end]) for end in shared)]
    if len(boundaries) == 1:
        return (Span(0, len(student), 0, len(teacher)),) if student or teacher else ()
    boundaries[-1] = (len(student), len(teacher))
    return tuple(Span(s0, s1, t0, t1) for (s0, t0), (s1, t1) in pairwise(boundaries))


def _token_counts_by_end(pieces: Sequence[bytes]) -> dict[int, int]:
    """Return the number of tokens up to each byte at which a token with bytes ends."""
    ends: dict[int, int] = {}
    offset = 0
    for number, piece in enumerate(pieces, start=1):
        if piece:
            offset += len(piece)
            ends[offset] = number
    return ends


def valid_utf8_prefix(data: bytes) -> bytes:
    """Return the longest valid UTF-8 prefix: a response may end, or become invalid, inside a character."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start]
    return data


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of one tokenizer as bytes.

    A special token's piece is SPECIAL and its name, so that it equals only that of the same name; all tokens that end
    a turn are TURN_END. An empty piece is an unused id.
    """

    pieces: tuple[bytes, ...]  # by token id
    texts: tuple[bytes, ...]  # the same, special tokens as the text they are written as
    turn_end: int  # the token that ends a turn of the chat template
    strips_leading_space: bool = False  # responses begin without the space that SentencePiece puts before a text

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, *, stop_token_ids: Sequence[int]) -> "Vocabulary":
        """Return the vocabulary of a tokenizer; `stop_token_ids` as ChatEncoder orders them, the template's own last.

        Raises ConfigError for a tokenizer without a fast implementation, whose byte encoding is not known.
        """
        if not tokenizer.is_fast:
            raise ConfigError(
                "policy.tokenizer.name", tokenizer.name_or_path, "is no fast tokenizer: its bytes are unknown"
            )
        bytes_of, strips = _detect_token_encoding(json.loads(tokenizer.backend_tokenizer.to_str()))  # type: ignore[attr-defined]
        added = {
            token_id: (str(token), bool(token.special)) for token_id, token in tokenizer.added_tokens_decoder.items()
        }
        pieces: list[bytes] = []
        texts: list[bytes] = []
        for token_id, token in enumerate(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))):
            text, is_special = added.get(token_id, ("", False))
            texts.append(text.encode() if text else bytes_of(token) if token is not None else b"")
            pieces.append(SPECIAL + text.encode() if is_special else texts[-1])
        for token_id in stop_token_ids:
            pieces[token_id] = TURN_END
        return cls(tuple(pieces), tuple(texts), stop_token_ids[-1], strips)

    @cached_property
    def ids(self) -> dict[bytes, int]:
        """Return the token of each piece: the first of several, for turn ends the template's."""
        first = {piece: token_id for token_id, piece in reversed(list(enumerate(self.pieces))) if piece}
        return {**first, TURN_END: self.turn_end}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.pieces), default=0)

    def beginning(self, text: bytes) -> int | None:
        """Return the longest token that `text` begins with; for a special piece the token of exactly that piece."""
        if text.startswith(SPECIAL):
            return self.ids.get(text)
        for length in range(min(len(text), self._longest), 0, -1):
            if (token_id := self.ids.get(text[:length])) is not None:
                return token_id
        return None

    def response_pieces(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the text that sampled tokens add: nothing if special, except a final TURN_END."""
        last = len(token_ids) - 1
        pieces = [b"" if i > len(self.pieces) - 1 else self.pieces[i] for i in token_ids]
        for index, piece in enumerate(pieces):
            if piece.startswith(SPECIAL) and len(piece) > 1 and not (piece == TURN_END and index == last):
                pieces[index] = b""
        if self.strips_leading_space and pieces and pieces[0].startswith(b" "):
            pieces[0] = pieces[0][1:]
        return pieces


def encode_with_pieces(
    tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary, text: str
) -> tuple[tuple[int, ...], list[bytes]]:
    """Return the tokens of a text and the part of the text that each stands for; the parts concatenate to the text.

    The name of a special token is read as text. If the tokens' own bytes are not the text (a normalizer rewrote it,
    a space was put before it), the parts are those that the tokenizer says it read, a character that several tokens
    share belonging to the first of them.
    """
    encoding = tokenizer(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
    token_ids = tuple(encoding["input_ids"])
    pieces = [vocabulary.texts[token_id] for token_id in token_ids]
    if b"".join(pieces) == text.encode():
        return token_ids, pieces
    ends = list(accumulate((end for _, end in encoding["offset_mapping"]), max))
    if ends:
        ends[-1] = len(text)
    starts = [0, *ends[:-1]]
    return token_ids, [text[start:end].encode() for start, end in zip(starts, ends, strict=True)]


def _detect_token_encoding(backend: dict[str, Any]) -> tuple[Callable[[str], bytes], bool]:
    """Return the function from a token's name to bytes, and whether decoding drops a space at the start of a text."""
    decoder = backend.get("decoder") or {}
    steps = decoder.get("decoders", [decoder])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return _from_byte_alphabet, False
    if kinds & {"Metaspace", "ByteFallback"} or any(_replaces_spaces(step) for step in steps):
        strips = any(step.get("type") == "Strip" and step.get("content") == " " and step.get("start") for step in steps)
        strips |= any(step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never" for step in steps)
        return _from_sentencepiece, strips
    return str.encode, False


def _replaces_spaces(step: dict[str, Any]) -> bool:
    return step.get("type") == "Replace" and step.get("pattern", {}).get("String") == "▁"


def _from_byte_alphabet(token: str) -> bytes:
    """Decode GPT-2's byte alphabet; a token with other characters was added as plain text."""
    try:
        return bytes(BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()


def _from_sentencepiece(token: str) -> bytes:
    if byte := BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: printable bytes map to themselves, the others in order to characters from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
