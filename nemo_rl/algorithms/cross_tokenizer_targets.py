"""A teacher's next-token distributions as distributions over the student's tokens.

M tokens of a student's response, N of the teacher's tokenization of its text, K most likely tokens that the teacher
gives. Pure numpy; probabilities are float64 until the end. The method: docs/distillation.md.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from nemo_rl.data.token_alignment import SPECIAL, Span, Vocabulary, align

NO_TOKEN_ID = -1  # an id that is no token
MIN_PROBABILITY = 1e-30  # probability that something is divided by


@dataclass(frozen=True, slots=True)
class AlignedResponse:
    """One sampled message in both tokenizations.

    The teacher's tokens are those of the text and one that ends the turn, also if the student's response has no end:
    the distribution before it is the one that follows the text.
    """

    student_start: int  # position in the student's sequence
    student_ids: tuple[int, ...]
    student_pieces: tuple[bytes, ...]  # a token that adds no text is empty
    num_aligned: int  # aligned student tokens; later ones follow bytes that are not valid text
    is_ended: bool  # the student's last token ends the turn
    teacher_start: int  # position in the teacher's sequence
    teacher_ids: tuple[int, ...]
    teacher_pieces: tuple[bytes, ...]  # bytes of each token; empty for the end of a turn

    @property
    def spans(self) -> tuple[Span, ...]:
        """Return the spans of the text's tokens, without the end of the turn."""
        return align(self.student_pieces[: self.num_aligned], self.teacher_pieces[:-1])


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """The teacher's most likely tokens before each of its own tokens of one response."""

    ids: np.ndarray  # [N, K] int64
    logprobs: np.ndarray  # [N, K] float32


@dataclass(frozen=True, slots=True)
class Targets:
    """The teacher's distribution before each token of the student, as far as it is known."""

    ids: np.ndarray  # [M, W] int64 of the student's vocabulary; -1: no token
    logprobs: np.ndarray  # [M, W] float32; 0 if there is no token
    unmatched: np.ndarray  # [M, W] float32: probabilities of teacher tokens without a counterpart, largest first
    span_lengths: np.ndarray  # [M] int64: at the first token of a span that is compared as a whole its tokens, else 0


@dataclass(frozen=True)
class TokenMap:
    """Mapping from the teacher's vocabulary to the student's."""

    student: Vocabulary
    teacher: Vocabulary

    @cached_property
    def beginning(self) -> np.ndarray:
        """Return [V teacher] int64: the longest student token that the teacher's token begins with, or -1."""
        return self._map_to_student(self.student.beginning)

    @cached_property
    def identical(self) -> np.ndarray:
        """Return [V teacher] int64: the student's token of the same bytes, or -1."""
        return self._map_to_student(self.student.ids.get)

    @cached_property
    def student_unmatched(self) -> np.ndarray:
        """Return [V student] bool: no token of the teacher has the same bytes."""
        unmatched = np.ones(len(self.student.pieces), dtype=bool)
        unmatched[self.identical[self.identical >= 0]] = False
        return unmatched

    @cached_property
    def teacher_starts(self) -> np.ndarray:
        """Return [V teacher, 2] int64: the first byte and the length of each token; -1 and 0 without bytes."""
        return np.array(
            [(piece[0] if piece else NO_TOKEN_ID, len(piece)) for piece in self.teacher.pieces], dtype=np.int64
        )

    def _map_to_student(self, find) -> np.ndarray:
        found = (find(piece) if piece else None for piece in self.teacher.pieces)
        return np.array([NO_TOKEN_ID if token_id is None else token_id for token_id in found], dtype=np.int64)


def prefix_targets(response: AlignedResponse, scores: TeacherScores, token_map: TokenMap) -> Targets:
    """Return the teacher's distribution over the student's next token, before each of its tokens.

    Before a student's token at byte o, the last teacher token that begins at or before o has distribution q; r are the
    bytes from there to o. Each teacher token v that begins with r goes to the student's longest token that the rest of
    v begins with, with weight q(v); so do likely tokens at earlier places that would have held the text up to o and
    more, with their probability over that of the tokens read in their stead. All is divided by the sum of the weights,
    including tokens that end at o, whose continuation is unknown. If the student's token reaches beyond the
    teacher's, it gets what the chain rule gives its text along the teacher's tokens, and the token that would have had
    this share gives it up. W is K + 1.
    """
    return _PrefixTargetBuilder(response, scores, token_map).targets()


class _PrefixTargetBuilder:
    """Computation of one response's targets."""

    def __init__(self, response: AlignedResponse, scores: TeacherScores, token_map: TokenMap) -> None:
        self.response, self.scores, self.map = response, scores, token_map
        self.student_starts = [0, *accumulate(map(len, response.student_pieces))]  # offsets in bytes; [M + 1]
        self.teacher_starts = np.array([0, *accumulate(map(len, response.teacher_pieces[:-1]))])  # [N]
        self.text = b"".join(response.teacher_pieces)
        self.width = scores.ids.shape[1] + 1

    def targets(self) -> Targets:
        size = len(self.response.student_ids)
        starts = np.array(self.student_starts[:-1])
        places = np.searchsorted(self.teacher_starts, starts, side="right") - 1  # indices of the teacher's tokens
        known = starts <= len(self.text)
        known[self.response.num_aligned + 1 :] = False
        plain = known & (self.teacher_starts[places] == starts)
        if self.map.student.strips_leading_space or self.map.teacher.strips_leading_space:
            plain &= starts > 0
        ids, probs = np.full((size, self.width), NO_TOKEN_ID, dtype=np.int64), np.zeros((size, self.width))
        ids[plain, :-1] = at(self.map.beginning, self.scores.ids[places[plain]])
        probs[plain, :-1] = np.exp(self.scores.logprobs[places[plain]].astype(np.float64))
        unmatched = _sort_descending(np.where(ids == NO_TOKEN_ID, probs, 0.0))
        merge_duplicate_ids(ids, probs)
        for row in np.flatnonzero(known):
            plain_distribution = dict(_tokens(ids[row], probs[row])) if plain[row] else None
            adjusted = self._adjust_distribution(int(row), int(places[row]), plain_distribution)
            if adjusted is not None:
                _write_top_tokens(adjusted, ids[row], probs[row])
        logprobs = np.where(ids == NO_TOKEN_ID, 0.0, np.log(np.maximum(probs, 1e-38)))
        return Targets(ids, logprobs.astype(np.float32), unmatched.astype(np.float32), np.zeros(size, dtype=np.int64))

    def _adjust_distribution(
        self, row: int, teacher_position: int, plain: dict[int, float] | None
    ) -> dict[int, float] | None:
        """Return the row's distribution; None if it is `plain`, from the teacher's tokens at this position alone."""
        piece, start = self.response.student_pieces[row], self.student_starts[row]
        longer = self.longer.get(start, ())
        reaches_beyond = (
            bool(piece) and row < self.response.num_aligned and self._end(row) > self._teacher_end(teacher_position)
        )
        if plain is not None and not longer and not reaches_beyond:
            return None
        share, found = (1.0, plain) if plain is not None else self._continuations(start, teacher_position)
        for rest, weight in longer:
            share += weight
            if rest and (token_id := self._longest_student_token(rest, is_first=False)) is not None:
                found[token_id] = found.get(token_id, 0.0) + weight
        if share <= 0:
            return {}
        found = {token_id: prob / share for token_id, prob in found.items()}
        if reaches_beyond:
            self._apply_chain_rule(row, teacher_position, found, share)
        return found

    def _continuations(self, start: int, teacher_position: int) -> tuple[float, dict[int, float]]:
        """Return the mass of the teacher's tokens that begin with the text seen so far, and their continuations."""
        seen = self.text[self.teacher_starts[teacher_position] : start]
        share, found = 0.0, dict[int, float]()
        for piece, prob in self._pieces(teacher_position):
            if not piece.startswith(seen):
                continue
            share += prob
            rest = piece[len(seen) :]
            token_id = self._longest_student_token(rest, is_first=start == 0) if rest else None
            if token_id is not None:
                found[token_id] = found.get(token_id, 0.0) + prob
        return share, found

    @cached_property
    def longer(self) -> dict[int, list[tuple[bytes, float]]]:
        """Return, at each byte, continuations and weights of likely longer tokens that cover the text before it.

        A teacher that knows `th` reads `t` only if no `h` follows: without these its distribution after `t` would
        tell the student that `h` is wrong wherever it sampled something else.
        """
        starts, found = set(self.student_starts[:-1]), dict[int, list[tuple[bytes, float]]]()
        for teacher_position in range(len(self.teacher_starts) - 1):
            begin, read = int(self.teacher_starts[teacher_position]), self.response.teacher_pieces[teacher_position]
            for piece, prob in self._pieces(teacher_position, self._may_continue[teacher_position]):
                if not read or len(piece) <= len(read) or not piece.startswith(read):
                    continue
                weight, passed = prob, teacher_position
                for end in range(begin + len(read), begin + len(piece) + 1):
                    while passed + 1 < len(self.teacher_starts) and self.teacher_starts[passed + 1] <= end:
                        # Relative to the tokens that were read.
                        weight /= max(self._observed_probability(passed), MIN_PROBABILITY)
                        passed += 1
                    if end in starts:
                        found.setdefault(end, []).append((piece[end - begin :], weight))
                    if self.text[end : end + 1] != piece[end - begin : end - begin + 1]:
                        break
        return found

    @cached_property
    def _may_continue(self) -> np.ndarray:
        """Return [N, K] bool: a longer token than the one that was read, with the same first byte."""
        read = np.array([(piece[0] if piece else NO_TOKEN_ID, len(piece)) for piece in self.response.teacher_pieces])
        likely = self.map.teacher_starts[np.minimum(self.scores.ids, len(self.map.teacher_starts) - 1)]
        may = (likely[..., 0] == read[:, None, 0]) & (likely[..., 1] > read[:, None, 1])
        if self.map.teacher.strips_leading_space:
            may[0] = True  # its tokens begin with another byte than the text
        return may

    def _longest_student_token(self, text: bytes, *, is_first: bool) -> int | None:
        """Return the longest student token that a text begins with; a response's first may include a space."""
        with_space = is_first and self.map.student.strips_leading_space and not text.startswith(SPECIAL)
        return self.map.student.beginning(b" " + text if with_space else text)

    def _pieces(self, teacher_position: int, wanted: np.ndarray | None = None) -> Iterator[tuple[bytes, float]]:
        """Yield the teacher's most likely tokens as bytes, without a text's leading space, and their probabilities."""
        strips, pieces = teacher_position == 0 and self.map.teacher.strips_leading_space, self.map.teacher.pieces
        ids, logprobs = self.scores.ids[teacher_position], self.scores.logprobs[teacher_position]
        if wanted is not None:
            ids, logprobs = ids[wanted], logprobs[wanted]
        for token_id, logprob in zip(ids.tolist(), logprobs.tolist(), strict=True):
            piece = pieces[token_id] if token_id < len(pieces) else b""
            yield piece[1:] if strips and piece.startswith(b" ") else piece, math.exp(logprob)

    def _apply_chain_rule(self, row: int, teacher_position: int, found: dict[int, float], share: float) -> None:
        """Give the sampled token the probability of its text along the teacher's tokens."""
        end = self._end(row)
        chain, first = self._observed_probability(teacher_position) / share, teacher_position
        while self._teacher_end(teacher_position) < end:
            teacher_position += 1
            if self._teacher_end(teacher_position) <= end:
                chain *= self._observed_probability(teacher_position)
            else:
                prefix = self.text[self.teacher_starts[teacher_position] : end]
                chain *= sum(prob for piece, prob in self._pieces(teacher_position) if piece.startswith(prefix))
        rest = self.text[self.student_starts[row] : self._teacher_end(first)]
        donor_id = self._longest_student_token(rest, is_first=self.student_starts[row] == 0)
        if chain > 0 and donor_id is not None and donor_id in found:
            chain = min(chain, found[donor_id])
            found[donor_id] -= chain
            token_id = self.response.student_ids[row]
            found[token_id] = found.get(token_id, 0.0) + chain

    def _observed_probability(self, teacher_position: int) -> float:
        return observed_probability(self.response, self.scores, teacher_position)

    def _end(self, row: int) -> int:
        return self.student_starts[row + 1]

    def _teacher_end(self, teacher_position: int) -> int:
        return (
            int(self.teacher_starts[teacher_position + 1])
            if teacher_position + 1 < len(self.teacher_starts)
            else len(self.text) + 1
        )


def identical_targets(response: AlignedResponse, scores: TeacherScores, token_map: TokenMap) -> Targets:
    """Return the targets of GOLD: whole spans are compared, at the distribution before their first token.

    Of the teacher's most likely tokens, those whose bytes are a student token's go to it, the others are unmatched. The
    probabilities of a span's later tokens, those that the teacher reads, multiply all of them: the chain rule, exact
    for the text that was sampled. W is K.
    """
    size, width = len(response.student_ids), scores.ids.shape[1]
    ids, logprobs = np.full((size, width), NO_TOKEN_ID, dtype=np.int64), np.zeros((size, width))
    unmatched, lengths = np.zeros((size, width)), np.zeros(size, dtype=np.int64)
    spans = [(s.student_start, s.student_end - s.student_start, s.teacher_start, s.teacher_end) for s in response.spans]
    if response.is_ended:
        num_tokens = len(response.teacher_ids)
        spans.append((size - 1, 1, num_tokens - 1, num_tokens))
    for first, length, start, end in spans:
        if not length or start == end:
            continue
        later = sum(
            math.log(observed_probability(response, scores, teacher_position))
            for teacher_position in range(start + 1, end)
        )
        found = at(token_map.identical, scores.ids[start])
        span_logprobs = scores.logprobs[start] + later
        ids[first], logprobs[first] = found, np.where(found == NO_TOKEN_ID, 0.0, span_logprobs)
        unmatched[first] = np.where(found == NO_TOKEN_ID, np.exp(span_logprobs), 0.0)
        lengths[first] = length
    return Targets(ids, logprobs.astype(np.float32), _sort_descending(unmatched).astype(np.float32), lengths)


def observed_probability(response: AlignedResponse, scores: TeacherScores, teacher_position: int) -> float:
    """Return the teacher's probability of its own token; of one outside the top k that of the k-th.

    The latter is an upper bound, so that spans of such tokens are overrated by at most this probability.
    """
    ids, logprobs = scores.ids[teacher_position], scores.logprobs[teacher_position]
    found = np.flatnonzero(ids == response.teacher_ids[teacher_position])
    return math.exp(float(logprobs[found[0]] if len(found) else logprobs.min()))


def at(table: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the table's entries; -1 for ids beyond its end, which pad a model's embedding."""
    return np.where(ids < len(table), table[np.minimum(ids, len(table) - 1)], NO_TOKEN_ID)


def merge_duplicate_ids(ids: np.ndarray, probs: np.ndarray) -> None:
    """Add the probabilities of equal ids in a row at the first of them; the others, and what is no token, become -1."""
    probs[ids == NO_TOKEN_ID] = 0.0
    rows = np.arange(len(ids))[:, None]
    flat = (rows * (ids.max(initial=0) + 1) + ids)[ids != NO_TOKEN_ID]
    places = np.flatnonzero(ids != NO_TOKEN_ID)
    _, first, inverse = np.unique(flat, return_index=True, return_inverse=True)
    totals = np.bincount(inverse, weights=probs.ravel()[places], minlength=len(first))
    kept_ids = ids.ravel()[places[first]]
    ids.fill(NO_TOKEN_ID)
    probs.fill(0.0)
    ids.ravel()[places[first]], probs.ravel()[places[first]] = kept_ids, totals


def _tokens(ids: np.ndarray, probs: np.ndarray) -> Iterator[tuple[int, float]]:
    return ((int(i), float(p)) for i, p in zip(ids, probs, strict=True) if i != NO_TOKEN_ID)


def _write_top_tokens(found: dict[int, float], ids: np.ndarray, probs: np.ndarray) -> None:
    """Write the most likely tokens of `found` to the row, as many as it holds."""
    best = sorted(((p, i) for i, p in found.items() if p > 0), reverse=True)[: len(ids)]
    ids.fill(NO_TOKEN_ID)
    probs.fill(0.0)
    for slot, (prob, token_id) in enumerate(best):
        ids[slot], probs[slot] = token_id, prob


def _sort_descending(probs: np.ndarray) -> np.ndarray:
    return -np.sort(-probs, axis=-1)
