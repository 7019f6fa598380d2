"""Screening of training prompts: lengths, and what else may keep a prompt from being trained on.

A million prompts take minutes to render, so a sample is screened before a model loads, and each prompt when it is
drawn. With `data.overlong: refuse` all are rendered before.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from nemo_rl.config.data import Overlong
from nemo_rl.data.chat import ChatEncoder, flat_token_ids
from nemo_rl.data.prompt_sets import PromptSet, messages_key
from nemo_rl.data.prompts import Blend
from nemo_rl.errors import ConfigError, NemoRLError, UnusableRowError
from nemo_rl.types import Prompt

logger = logging.getLogger(__name__)

KEY = "data.max_input_seq_length"
MAX_CHARACTERS_PER_TOKEN = 256  # above the average of any tokenizer
SCREENED = OVERLONG, HELD_OUT, UNUSABLE = "overlong_prompts", "held_out_prompts", "unusable_prompts"  # metrics
MAX_NAMED = 10  # prompts in one line of the log


class Verdict(Enum):
    """The use of a drawn prompt."""

    TRAIN = "train"
    MASK = "mask"  # keeps its place in the step, with no weight in the loss
    DROP = "drop"  # the next prompt takes its place


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """The maximum length of a prompt."""

    encoder: ChatEncoder
    max_tokens: int

    def fits(self, prompt: Prompt) -> bool:
        """Return whether the rendered prompt has at most `max_tokens` tokens; raises ConfigError as the template."""
        if self._is_beyond_encoding(prompt):
            return False
        return self.encoder.prompt_fits(prompt.messages, prompt.tools, self.max_tokens)

    def describe(self, prompt: Prompt) -> str:
        """Name an over-long prompt with its length."""
        if self._is_beyond_encoding(prompt):
            length = f"{_count_characters(prompt)} characters"
        else:
            length = f"{len(flat_token_ids(self.encoder.encode_prompt(prompt.messages, prompt.tools)))} tokens"
        return f"prompt {prompt.prompt_id} of {prompt.dataset!r} has {length}"

    def _is_beyond_encoding(self, prompt: Prompt) -> bool:
        """Return whether a prompt has so many characters that it need not be encoded to be too long."""
        return _count_characters(prompt) > self.max_tokens * MAX_CHARACTERS_PER_TOKEN


def _count_characters(prompt: Prompt) -> int:
    return sum(len(message.content) for message in prompt.messages)


@dataclass(slots=True)
class PromptScreen:
    """Decides on each prompt that is drawn, and counts those that are not trained on; by default all are."""

    limit: LengthLimit | None = None
    overlong: Overlong = "drop"
    held_out: frozenset[int] = frozenset()  # `messages_key` of prompts that are validated on
    check: Callable[[Prompt], None] | None = None  # raises for a prompt that cannot be used, which is dropped
    counts: Counter[str] = field(default_factory=Counter)  # since the last `take_metrics`

    def judge(self, prompt: Prompt) -> Verdict:
        if self.held_out and messages_key(prompt) in self.held_out:
            self.counts[HELD_OUT] += 1
            return Verdict.DROP
        try:
            if self.check is not None:
                self.check(prompt)
            is_overlong = self.limit is not None and not self.limit.fits(prompt)
        except NemoRLError as error:
            return self.reject(f"prompt {prompt.prompt_id} of {prompt.dataset!r}: {error}")
        if not is_overlong:
            return Verdict.TRAIN
        self.counts[OVERLONG] += 1
        return Verdict.MASK if self.overlong == "mask" else Verdict.DROP

    def trains(self, prompt: Prompt) -> bool:
        """Return whether a prompt is neither held out nor over-long, without counting it."""
        is_held_out = bool(self.held_out) and messages_key(prompt) in self.held_out
        return not is_held_out and (self.limit is None or self.limit.fits(prompt))

    def reject(self, problem: str) -> Verdict:
        self.counts[UNUSABLE] += 1
        logger.warning("dropped a training prompt that cannot be used: %s", problem)
        return Verdict.DROP

    def take_metrics(self) -> dict[str, float]:
        """Return the counts since the last call."""
        counts, self.counts = self.counts, Counter()
        return {OVERLONG: 0.0} | {name: float(count) for name, count in counts.items()}


def check_training_prompts(train: PromptSet, screen: PromptScreen) -> None:
    """Render a sample of every dataset, and as many more as it takes to find a prompt to train on.

    With `overlong: refuse` all are rendered. Raises ConfigError for an over-long prompt then, for prompts that are all
    over-long otherwise, and for a template that refuses a prompt.
    """
    limit = screen.limit
    assert limit is not None
    if screen.overlong == "refuse":
        refuse_overlong(train.prompts, limit)
        return
    indices = train.prompts.spread() if isinstance(train.prompts, Blend) else range(len(train.prompts))
    sample = [train.prompts[index] for index in indices]
    overlong = [prompt for prompt in sample if not limit.fits(prompt)]
    if overlong:
        logger.warning(
            "%d of %d sampled training prompts are longer than %s = %d and will not be trained on "
            "(data.overlong: %s), e.g. %s",
            len(overlong), len(sample), KEY, limit.max_tokens, screen.overlong, limit.describe(overlong[0]),
        )  # fmt: skip
    if any(screen.trains(prompt) for prompt in sample) or any(trainable_prompts(train.prompts, screen)):
        return
    if overlong:
        problem = f"all training prompts are longer, e.g. {limit.describe(overlong[0])}"
        raise ConfigError(KEY, limit.max_tokens, problem)
    raise ConfigError("data.disjoint", True, "every training prompt occurs in a validation dataset")


def check_measured_prompts(prompt_set: PromptSet, limit: LengthLimit, overlong: Overlong, count: int | None) -> int:
    """Return how many of the first `count` prompts of a validation set are over-long, and name them in the log.

    Raises ConfigError if all are, and for the first of them with `overlong: refuse`.
    """
    prompts = prompt_set.prompts[:count]
    if overlong == "refuse":
        refuse_overlong(prompts, limit)
    found = [prompt for prompt in prompts if not limit.fits(prompt)]
    if not found:
        return 0
    if len(found) == len(prompts):
        problem = f"all prompts of {prompt_set.name!r} are longer, e.g. {limit.describe(found[0])}"
        raise ConfigError(KEY, limit.max_tokens, problem)
    named = ", ".join(prompt.prompt_id for prompt in found[:MAX_NAMED])
    logger.warning(
        "validation set %s: %d of %d prompts are longer than %s = %d; they are measured if a response has room, else "
        "they count as wrong: %s%s",
        prompt_set.name, len(found), len(prompts), KEY, limit.max_tokens, named,
        ", ..." if len(found) > MAX_NAMED else "",
    )  # fmt: skip
    return len(found)


def find_overlong(prompts: Sequence[Prompt], limit: LengthLimit) -> dict[int, str]:
    """Return the indices of the over-long prompts, each with its dataset.

    A prompt that the chat template refuses is none of them: its rollouts fail. Raises ConfigError if all are.
    """
    found: dict[int, str] = {}
    for index, prompt in enumerate(prompts):
        try:
            fits = limit.fits(prompt)
        except ConfigError:
            continue
        if not fits:
            found[index] = prompt.dataset
    if found and len(found) == len(prompts):
        problem = f"all prompts are longer, e.g. {limit.describe(prompts[0])}"
        raise ConfigError(KEY, limit.max_tokens, problem)
    return found


def refuse_overlong(prompts: Iterable[Prompt], limit: LengthLimit) -> None:
    """Render all prompts; raises ConfigError for the first that is over-long."""
    for prompt in prompts:
        if not limit.fits(prompt):
            raise ConfigError(KEY, limit.max_tokens, limit.describe(prompt))


def trainable_prompts(prompts: Sequence[Prompt], screen: PromptScreen) -> Iterator[Prompt]:
    """Yield the prompts that are trained on, in their order, without counting the others."""
    for index in range(len(prompts)):
        try:
            prompt = prompts[index]
            trains = screen.trains(prompt)
        except (UnusableRowError, ConfigError):  # ConfigError: the template refuses it; dropped when it is drawn
            continue
        if trains:
            yield prompt
