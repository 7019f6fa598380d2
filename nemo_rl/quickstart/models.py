"""The quickstart's models: tokenizers of characters, small Llamas and a mixture of experts, and how each is trained
from fresh weights."""

import random
import string
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import transformers  # whose models are imported when they are named: most runs name none of these
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nemo_rl.data.conversations import Conversation
from nemo_rl.quickstart.words import QUICKSTART_TRAIN, QUICKSTART_VALIDATION, extract_words
from nemo_rl.types import Message, Prompt

OnStep = Callable[[int, int, float], None]  # (steps done, steps in all, loss)

HEAD_SIZE = 32  # the smallest that vLLM's attention takes on a CPU
UNNAMED = (("tokenizer", "characters"), ("num_experts", 0))  # values that a recipe's text does not state
TURN_START, TURN_END, PADDING, UNKNOWN = "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|unknown|>"
QUESTION_TOKENS = ("Spell", " this", " word", " backward", " (", "example", ": ", " ->", " nus", ")")
ROLE_TOKENS = ("system", "user", "assistant", "tool")
CHARACTERS = (*string.ascii_letters, *string.digits, *string.punctuation, " ", "\n")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{{{{ '{TURN_START}' + message['role'] + '\\n' + message['content'] + '{TURN_END}\\n' }}}}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{{{{ '{TURN_START}assistant\\n' }}}}{{% endif %}}"
)
# Two letters each, the more frequent ones in English; a text is read from the left.
FREQUENT_PAIRS = "thheineranreonatenndtiesorteofedisitalarsttontngsehaasouiolevecomedehiriroicneearacelichllbemasiomur"
LETTER_PAIRS = tuple(FREQUENT_PAIRS[i : i + 2] for i in range(0, len(FREQUENT_PAIRS), 2))
PAIRS_TURN_END, PAIRS_PADDING, PAIRS_UNKNOWN = "<|end|>", "<|pad|>", "<|unk|>"
PAIRS_TURN_STARTS = ("<|user|>", "<|assistant|>")
PAIRS_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{{{{ '<|' + message['role'] + '|>\n' + message['content'] + '{PAIRS_TURN_END}\n' }}}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that the weights depend on, apart from the words."""

    seed: int = 0  # draws the initial weights and the spellings
    num_steps: int = 280
    batch_size: int = 64  # spellings per step
    peak_learning_rate: float = 2e-3  # start of the linear decay, at step 0
    warmup_steps: int = 30
    right_share: float = 0.35  # share of right spellings
    hidden_size: int = 192
    num_layers: int = 2
    tokenizer: Literal["characters", "pairs"] = "characters"
    num_experts: int = 0  # per layer, two of which compute a token; 0: a dense model

    @property
    def text(self) -> str:
        """Return a text that differs whenever the recipe or the words give different weights."""
        named = asdict(self)
        named = {name: value for name, value in named.items() if (name, value) not in UNNAMED}
        training = ", ".join(f"{name} {value}" for name, value in named.items())
        words = (section.model_dump_json(exclude_unset=True) for section in (QUICKSTART_TRAIN, QUICKSTART_VALIDATION))
        return "\n".join((training, *words, ""))


def student(seed: int) -> Recipe:
    """Return the recipe of an imperfect speller that explores: the model that GRPO starts from."""
    return Recipe(seed=seed)


def teacher(seed: int) -> Recipe:
    """Return the recipe of a good speller of the same family."""
    return Recipe(seed=seed, right_share=1.0)


def experts(seed: int) -> Recipe:
    """Return the recipe of an imperfect speller that is a mixture of 8 experts; each sees a quarter of the tokens."""
    return Recipe(seed=seed, num_steps=560, num_experts=8)


def pairs_teacher(seed: int) -> Recipe:
    """Return the recipe of a good speller whose tokenizer has two-letter tokens, which take longer to learn."""
    return Recipe(seed=seed, right_share=1.0, num_steps=600, tokenizer="pairs")


def spellings(prompts: Sequence[Prompt], recipe: Recipe) -> list[Conversation]:
    """Return every training conversation in order, `batch_size` per step; a function of prompts and recipe."""
    rng, words = random.Random(recipe.seed), extract_words(prompts)
    conversations = []
    for _ in range(recipe.num_steps):
        for prompt_index in rng.choices(range(len(prompts)), k=recipe.batch_size):
            answer = Message("assistant", sample_spelling(words[prompt_index], rng, right_share=recipe.right_share))
            conversations.append(Conversation((*prompts[prompt_index].messages, answer)))
    return conversations


def sample_spelling(word: str, rng: random.Random, *, right_share: float) -> str:
    """Return the word backward with probability `right_share`, else forward, or backward with two letters swapped."""
    backward = word[::-1]
    if rng.random() < right_share:
        return backward
    if rng.random() < 0.5:
        return word
    letters = list(backward)
    first, second = rng.sample(range(len(letters)), 2)
    letters[first], letters[second] = letters[second], letters[first]
    return "".join(letters)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a ChatML tokenizer of about 120 tokens; characters beyond printable ASCII are one unknown token."""
    return _tokenizer(
        (PADDING, TURN_START, TURN_END, UNKNOWN),
        (*QUESTION_TOKENS, *ROLE_TOKENS),
        eos_token=TURN_END,
        pad_token=PADDING,
        unk_token=UNKNOWN,
        additional_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
    )


def make_pair_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of another family: also two-letter tokens, other special tokens, another template."""
    return _tokenizer(
        (PAIRS_PADDING, *PAIRS_TURN_STARTS, PAIRS_TURN_END, PAIRS_UNKNOWN),
        (*QUESTION_TOKENS, *ROLE_TOKENS, *LETTER_PAIRS),
        eos_token=PAIRS_TURN_END,
        pad_token=PAIRS_PADDING,
        unk_token=PAIRS_UNKNOWN,
        additional_special_tokens=list(PAIRS_TURN_STARTS),
        chat_template=PAIRS_CHAT_TEMPLATE,
    )


def _tokenizer(
    special: Sequence[str], multi_char_tokens: Sequence[str], *, unk_token: str, **options: Any
) -> PreTrainedTokenizerFast:
    """Return a tokenizer that splits a text into the longest tokens of several characters, else single characters."""
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys((*special, *multi_char_tokens, *CHARACTERS)))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unk_token))
    longest_first = "|".join(_escape_parentheses(piece) for piece in sorted(multi_char_tokens, key=len, reverse=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{longest_first}|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=unk_token,
        clean_up_tokenization_spaces=False,
        model_max_length=128,
        **options,
    )


def _escape_parentheses(piece: str) -> str:
    return "".join("\\" + character if character in "()" else character for character in piece)


def make_model(tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> PreTrainedModel:
    """Return a model with fresh float32 weights (0.7M for the student), a function of the recipe's sizes and seed.

    Not a Qwen: transformers 5.19 gives a directory of such a model type its own tokenizer, whatever is in it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        if recipe.num_experts == 0:
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_sizes(tokenizer, recipe))).float()
        own: dict[str, Any] = {"intermediate_size": recipe.hidden_size, "head_dim": HEAD_SIZE}
        own["num_local_experts"] = recipe.num_experts
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**(_sizes(tokenizer, recipe) | own))).float()


def make_classifier(tokenizer: PreTrainedTokenizerBase, *, seed: int) -> PreTrainedModel:
    """Return the student's body with a head of one label, for a reward model; a function of the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes: dict[str, Any] = {**_sizes(tokenizer, student(seed)), "num_labels": 1}
        config = transformers.LlamaConfig(**sizes)
        return transformers.LlamaForSequenceClassification(config).float()


def _sizes(tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> dict[str, Any]:
    vocabulary = tokenizer.get_vocab()
    return {
        "vocab_size": len(vocabulary),
        "hidden_size": recipe.hidden_size,
        "intermediate_size": 2 * recipe.hidden_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.hidden_size // HEAD_SIZE,
        "num_key_value_heads": recipe.hidden_size // (2 * HEAD_SIZE),
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": vocabulary[str(tokenizer.eos_token)],
        "pad_token_id": vocabulary[str(tokenizer.pad_token)],
    }
