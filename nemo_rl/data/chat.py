"""Chat encoding: conversations as token sequences that are only ever appended to.

The past is never rendered again: a template may drop or rewrite it (thinking of earlier turns, white space), and its
text need not tokenize into what was sampled. A turn's new tokens, the bridge, are cut out of a rendering of the new
messages after a stand-in for the sampled one.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nemo_rl.data.images import grey_picture
from nemo_rl.data.messages import to_openai_message
from nemo_rl.data.vision import ImageEncoder
from nemo_rl.errors import ConfigError, DataError
from nemo_rl.image_features import PlacedImage
from nemo_rl.types import Message, MessageLog, TextPart, TokenizedMessage, ToolCall

TEMPLATE_KEY = "policy.tokenizer.chat_template"
SENTINEL = "nemoRlStandIn"  # letters only: no template escapes or strips them
PROBE = "nemoRlProbe"
QUESTION = Message("user", "question")
PLACEHOLDER_CALL = ToolCall("call00000", "tool", "{}")  # nine letters or digits: Mistral's templates insist


class ChatTemplateError(Exception):
    """Failure of a template to render messages; the text says why."""


class ChatTemplate:
    """The tokenizer's own chat template, or `text`, with the variables of a recipe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text: str | None, variables: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._variables = dict(variables)
        self.takes_parts = False  # every content is a list of parts, as templates of models that see may expect it

    @property
    def name(self) -> str:
        """Return whose template it is, or how its text begins, for errors."""
        return f"template of {self._tokenizer.name_or_path}" if self._text is None else self._text[:60]

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> str:
        """Return the conversation's text. Most templates take a call's arguments as an object, some as text."""
        try:
            return self._render(messages, tools, add_generation_prompt, arguments_as_text=False)
        except ChatTemplateError:
            if not any(message.tool_calls for message in messages):
                raise
            return self._render(messages, tools, add_generation_prompt, arguments_as_text=True)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        *,
        arguments_as_text: bool,
    ) -> str:
        names = {call.id: call.name for message in messages for call in message.tool_calls}
        conversation = [
            _to_template_message(message, names, arguments_as_text, as_parts=self.takes_parts) for message in messages
        ]
        try:
            text = self._tokenizer.apply_chat_template(
                conversation,
                tools=[dict(tool) for tool in tools] or None,
                chat_template=self._text,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self._variables,
            )
        except Exception as error:  # a template is a program, which may divide by zero or recurse without end
            raise ChatTemplateError(f"{type(error).__name__}: {error}") from error
        return str(text)


def _to_template_message(
    message: Message, names: Mapping[str, str], arguments_as_text: bool, *, as_parts: bool
) -> dict[str, Any]:
    """Return the message as templates expect it; a tool's result gets the name of its call."""
    fields = to_openai_message(message, as_parts=as_parts, write_image=lambda _: {"type": "image"})
    if not arguments_as_text:
        for call in fields.get("tool_calls", ()):
            call["function"]["arguments"] = _parse_arguments(call["function"]["arguments"])
    if message.tool_call_id is not None and message.tool_call_id in names:
        fields["name"] = names[message.tool_call_id]
    return fields


def _parse_arguments(text: str) -> Any:
    """Return the object that the text describes; a model's invalid JSON stays text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


AnswerEnd: TypeAlias = Literal["token", "text", "open"]


def flat_token_ids(message_log: MessageLog) -> tuple[int, ...]:
    """Return all tokens of a history in order."""
    return tuple(token_id for message in message_log for token_id in message.token_ids)


class ChatEncoder:
    """Tokens of prompts and of what follows a sampled message, for one tokenizer and chat template.

    A segment that was not sampled has all its tokens on its last message; its earlier messages carry none.
    """

    is_rendered_by_server = False  # True: messages have no tokens here, and requests carry the messages themselves

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        images: ImageEncoder | None = None,
    ) -> None:
        """`images` encodes those of messages; without it they are refused."""
        self._tokenizer = tokenizer
        self._images = images
        self._rust_tokenizer = _find_rust_tokenizer(tokenizer)
        self._template = ChatTemplate(tokenizer, chat_template, chat_template_kwargs or {})
        special = {str(token) for token in tokenizer.all_special_tokens}
        special |= {str(added) for added in tokenizer.added_tokens_decoder.values() if added.special}
        alternatives = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True))
        self._special = re.compile(f"(?:{alternatives})" if special else r"(?!)")
        self._special_run = re.compile(rf"(?:{self._special.pattern}\s*)+")
        self._supported_roles: set[str] = set()  # roles that the template is known to render after a sampled message
        self._supported_first_roles: set[str] = set()  # and at the start of a conversation
        if images is not None:
            self._template.takes_parts = QUESTION.content not in self._render_or_empty((QUESTION,))

    @property
    def images(self) -> ImageEncoder | None:
        """Return what encodes images; None if the model reads text alone."""
        return self._images

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return the tokenizer; None if the server renders."""
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Return the tokens that end a turn: end of sequence and, if different, the template's turn terminator."""
        terminator = self._encode(self._terminator) if self._terminator else ()
        ids = [self._tokenizer.eos_token_id, *(terminator if len(terminator) == 1 else ())]
        return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))

    def check(self, roles: Iterable[str] = ("user",)) -> None:
        """Raise ConfigError unless prompts of a user and answers to the model by all `roles` can be rendered."""
        self.encode_prompt((Message("user", SENTINEL),))
        for role in roles:
            self._check_role(role, ())
        if not self.stop_token_ids:
            raise ConfigError("policy.tokenizer.name", self._tokenizer.name_or_path, "no token is known to end a turn")

    @cached_property
    def num_opening_tokens(self) -> int:
        """Return the number of tokens that the template writes to open an answer, after the messages before it."""
        closed = self._encode(self._template.render((QUESTION,), (), add_generation_prompt=False))
        return max(len(self._encode(self._opening)) - len(closed), 0)

    @property
    def edge_token_ids(self) -> tuple[int | None, int | None]:
        """Return the tokenizer's first and last token of a sequence; None if missing."""
        tokenizer: Any = self._tokenizer  # whose ids are typed as those of any special token
        return tokenizer.bos_token_id, tokenizer.eos_token_id

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> MessageLog:
        """Return the rendered conversation with the opening of the assistant's turn; raises ConfigError if refused."""
        return self._to_message_log(messages, self._prompt_text(messages, tools))

    def prompt_fits(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], max_tokens: int) -> bool:
        """Return whether `encode_prompt` gives at most `max_tokens` tokens; raises as it does.

        Tokenizing takes ten times as long as rendering, and most prompts need none: no token stands for less than a
        byte, but for the space that some tokenizers put before the text. Tokenizers that first write a character in
        several (NFKC) may go beyond that.
        """
        text = self._prompt_text(messages, tools)
        if any(message.images for message in messages):
            return len(self._place(text, messages)[0]) <= max_tokens
        return len(text.encode(errors="surrogatepass")) < max_tokens or len(self._encode(text)) <= max_tokens

    def encode_turn(
        self, message_log: MessageLog, new_messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> MessageLog:
        """Return what to append to a history that ends with a sampled message: new messages and the turn's opening.

        A sampled message that was cut before its terminator gets it here, as context.

        Raises ConfigError when the template refuses, or silently drops, a role of the new messages.
        """
        if not new_messages:
            return ()
        sampled = message_log[-1]
        if sampled.message.role != "assistant":
            raise ValueError(f"the history ends with a message of {sampled.message.role}, not of the assistant")
        for role in dict.fromkeys(message.role for message in new_messages):
            self._check_role(role, tools)
        log = self._to_message_log(new_messages, self._bridge(sampled.message, new_messages, tools))
        last = log[-1]
        if sampled.token_ids and last.token_ids and sampled.token_ids[-1] == last.token_ids[0]:
            images = tuple(placed.shifted(-1) for placed in last.images)
            log = (*log[:-1], replace(last, token_ids=last.token_ids[1:], images=images))
        return log

    def encode_answer(
        self, message: Message, tools: Sequence[Mapping[str, Any]] = (), *, end: AnswerEnd = "token"
    ) -> tuple[int, ...]:
        """Return the tokens that the model should write for an assistant's message in a turn that has been opened.

        They are the template's text of the message, up to the token that ends its turn. If the template ends turns by
        text alone, `end` decides: the end-of-sequence token replaces that text, it stays, or the answer is left open
        for the next turn, which begins with it.

        Raises ConfigError when the template refuses the message, drops its text or its thinking, or renders it
        differently from the opening of a turn.
        """
        try:
            text, is_ended = self._answer(message, tools if message.tool_calls else ())
            if (thinking := message.thinking) and thinking.strip() not in text:
                raise ChatTemplateError("its thinking is not rendered, so it cannot be trained on")
        except ChatTemplateError as error:
            raise self._template_error(["assistant"], error) from error
        if is_ended or end == "open":
            return self._encode(text)
        return (
            (*self._encode(text), self.stop_token_ids[0])
            if end == "token"
            else self._encode(text + self._text_after_answer)
        )

    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Return the text of sampled tokens, without a final stop token and, unless kept, other special tokens."""
        if token_ids and token_ids[-1] in self.stop_token_ids:
            token_ids = token_ids[:-1]
        if self._rust_tokenizer is not None:
            return self._rust_tokenizer.decode(list(token_ids), skip_special_tokens=not keep_special)
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=not keep_special, clean_up_tokenization_spaces=False
        )
        return text if isinstance(text, str) else "".join(text)

    def strip_special(self, text: str) -> str:
        """Return a text without special tokens."""
        return self._special.sub("", text)

    def _to_message_log(self, messages: Sequence[Message], text: str) -> MessageLog:
        """Return messages with the tokens of their rendered text, all on the last of them."""
        token_ids, images = self._place(text, messages)
        last = len(messages) - 1
        return tuple(
            TokenizedMessage(message, token_ids, images=images) if i == last else TokenizedMessage(message, ())
            for i, message in enumerate(messages)
        )

    def _place(self, text: str, messages: Sequence[Message]) -> tuple[tuple[int, ...], tuple[PlacedImage, ...]]:
        """Return the tokens of a text in which `messages` are rendered, and their images."""
        images = [image for message in messages for image in message.images]
        if not images:
            return self._encode(text), ()
        if self._images is None:
            raise DataError(f"{len(images)} images in the messages: this policy reads text")
        if any(self._images.mark in message.content for message in messages):
            raise DataError(f"a text contains {self._images.mark}, which stands for an image")
        return self._images.place(text, images, self._tokenizer)

    def check_images(self) -> None:
        """Raise ConfigError unless a user's image can be encoded, if the model sees; it is one grey picture."""
        if self._images is None:
            return
        image = Message("user", (grey_picture(), TextPart(SENTINEL)))
        try:
            self.encode_prompt((image,))
        except DataError as error:
            raise ConfigError(TEMPLATE_KEY, self._template.name, f"images are not rendered: {error}") from error

    def _render_or_empty(self, messages: Sequence[Message]) -> str:
        try:
            return self._template.render(messages, (), add_generation_prompt=True)
        except ChatTemplateError:
            return ""

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _prompt_text(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        if messages[0].role == "system":
            self._check_system_role()
        return self._render_prompt(messages, tools)

    def _render_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        try:
            return self._template.render(messages, tools, add_generation_prompt=True)
        except ChatTemplateError as error:
            raise self._template_error((message.role for message in messages), error) from error

    @cached_property
    def _opening(self) -> str:
        return self._template.render((QUESTION,), (), add_generation_prompt=True)

    @cached_property
    def _text_after_answer(self) -> str:
        """Return the text that the template renders after an assistant's text at the end of a conversation."""
        past = (QUESTION, Message("assistant", SENTINEL))
        _, found, tail = self._template.render(past, (), add_generation_prompt=False).rpartition(SENTINEL)
        if not found:
            raise ChatTemplateError("the assistant's text is not rendered, so it cannot be trained on")
        return tail

    def _answer(self, message: Message, tools: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
        """Return the text of a message after the opening of its turn, and whether a special token ends it."""
        text = self._template.render((QUESTION, message), tools, add_generation_prompt=False)
        opening = self._template.render((QUESTION,), tools, add_generation_prompt=True) if tools else self._opening
        if not text.startswith(opening):
            raise ChatTemplateError(f"its turn does not begin as the generation prompt opens it: {opening[-40:]!r}")
        text, closing = text[len(opening) :], self._text_after_answer
        end = text.rfind(self._terminator) if self._terminator else -1
        if end >= 0:
            return text[: end + len(self._terminator)], True
        *_, last = (None, *self._special_run.finditer(text))
        if last is not None and last.end() == len(text):
            return text.rstrip(), True  # another token than after plain text, e.g. the end of a call
        return text.removesuffix(closing), False

    @cached_property
    def _terminator(self) -> str:
        """Return the special token that the template renders after an assistant's text; empty if it renders none."""
        past, following = Message("assistant", ""), (Message("user", "next"),)
        try:
            tail = self._text_after_sentinel(past, following, ())
        except ChatTemplateError:
            try:
                tail = self._bridge_by_difference(past, following, ())
            except ChatTemplateError:
                return ""
        first = self._special.match(tail.lstrip())
        return first.group() if first else ""

    def _bridge(self, sampled: Message, new_messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> str:
        """Return the text from the sampled turn's terminator on."""
        sampled = _add_missing_calls(sampled, new_messages)
        try:
            tail = self._text_after_sentinel(sampled, new_messages, tools)
            return self._from_terminator(tail, after_call=bool(sampled.tool_calls))
        except ChatTemplateError as refusal:
            try:
                return self._bridge_by_difference(sampled, new_messages, tools)
            except ChatTemplateError:
                raise self._template_error((message.role for message in new_messages), refusal) from refusal

    def _text_after_sentinel(
        self, sampled: Message, new_messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> str:
        """Return the rendered text after the sampled message, whose text or last argument is the sentinel."""
        sentinel = SENTINEL
        while any(sentinel in message.content for message in new_messages):
            sentinel += "n"
        conversation = (QUESTION, _with_sentinel(sampled, sentinel), *new_messages)
        text = self._template.render(conversation, tools, add_generation_prompt=True)
        _, found, tail = text.rpartition(sentinel)
        if not found:
            raise ChatTemplateError("the assistant's text is not rendered")
        return tail

    def _from_terminator(self, tail: str, *, after_call: bool) -> str:
        """Return the tail without what closes the sampled text itself: a space, or the end of a tool call's syntax."""
        run = self._special_run.search(tail)
        if run is None or (not after_call and tail[: run.start()].strip()):
            return tail  # no special token ends the turn: its text does
        start = tail.find(self._terminator, run.start(), run.end()) if self._terminator else -1
        return tail[run.start() if start < 0 else start :]

    def _bridge_by_difference(
        self, sampled: Message, new_messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> str:
        """Return the text that a longer rendering adds to a shorter one, from the terminator between them on."""
        past = (QUESTION, Message("assistant", sampled.content or "answer", sampled.tool_calls))
        shorter = self._template.render(past, tools, add_generation_prompt=False)
        longer = self._template.render((*past, *new_messages), tools, add_generation_prompt=True)
        if not longer.startswith(shorter):
            raise ChatTemplateError("the template rewrites earlier turns and hides the assistant's text")
        ending = re.search(rf"{self._special.pattern}\s*$", shorter)
        return longer[len(shorter) if ending is None else ending.start() :]

    def _check_role(self, role: str, tools: Sequence[Mapping[str, Any]]) -> None:
        if role in self._supported_roles:
            return
        call_id = PLACEHOLDER_CALL.id if role == "tool" else None
        probe = Message(role, PROBE, tool_call_id=call_id)  # type: ignore[arg-type]
        if probe.content not in self._bridge(Message("assistant", ""), (probe,), tools):
            raise self._template_error([role], ChatTemplateError("its messages are not rendered"))
        self._supported_roles.add(role)

    def _check_system_role(self) -> None:
        if "system" not in self._supported_first_roles:
            text = self._render_prompt((Message("system", SENTINEL), QUESTION), ())
            if SENTINEL not in text:
                raise self._template_error(["system"], ChatTemplateError("its messages are not rendered"))
            self._supported_first_roles.add("system")

    def _template_error(self, roles: Iterable[str], error: ChatTemplateError) -> ConfigError:
        named = ", ".join(dict.fromkeys(roles))
        return ConfigError(TEMPLATE_KEY, self._template.name, f"refuses messages of role {named}: {error}")


def _add_missing_calls(sampled: Message, new_messages: Sequence[Message]) -> Message:
    """Return the sampled message with the calls that the new messages answer, if only its text has them."""
    answers = [message for message in new_messages if message.role == "tool"]
    if not answers or new_messages[0].role != "tool" or sampled.tool_calls:
        return sampled
    calls = tuple(
        ToolCall(answer.tool_call_id or PLACEHOLDER_CALL.id, PLACEHOLDER_CALL.name, "{}") for answer in answers
    )
    return Message("assistant", sampled.content, calls)


def _with_sentinel(sampled: Message, sentinel: str) -> Message:
    if not sampled.tool_calls:
        return Message("assistant", sentinel)
    *earlier, last = sampled.tool_calls
    return Message("assistant", "", (*earlier, ToolCall(last.id, last.name, json.dumps({"argument": sentinel}))))


class TextOnlyChatEncoder(ChatEncoder):
    """An encoder for servers that render messages themselves: messages have no tokens here, and every prompt fits."""

    is_rendered_by_server = True

    def __init__(self) -> None:
        """Make an encoder without a tokenizer."""

    @property
    def tokenizer(self) -> None:
        return None

    @property
    def images(self) -> None:
        """Return None: the server encodes them."""
        return None

    @property
    def vocab_size(self) -> int:
        return 0

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Return no tokens: the server ends turns."""
        return ()

    def check(self, roles: Iterable[str] = ()) -> None:
        """Accept every role: the server's template is not known."""

    def encode_prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> MessageLog:
        return tuple(TokenizedMessage(message, ()) for message in messages)

    def prompt_fits(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], max_tokens: int) -> bool:
        return True

    def encode_turn(
        self, message_log: MessageLog, new_messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> MessageLog:
        return tuple(TokenizedMessage(message, ()) for message in new_messages)

    def decode(self, token_ids: Sequence[int], *, keep_special: bool = False) -> str:
        """Raise ValueError: responses come as text."""
        raise ValueError("the tokens of this server are not known")


def _find_rust_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Any | None:
    """Return the `tokenizers.Tokenizer` that decodes for a tokenizer; None if its class decodes itself.

    Decoding a few tokens through transformers takes three times as long (2.8 us in place of 0.8).
    """
    cls, base = type(tokenizer), PreTrainedTokenizerFast
    if not isinstance(tokenizer, base) or cls.decode is not base.decode or cls._decode is not base._decode:
        return None
    return tokenizer.backend_tokenizer
