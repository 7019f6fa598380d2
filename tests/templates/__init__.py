"""The chat templates of this directory, and a small tokenizer that knows their special tokens."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent

SPECIAL_TOKENS = {  # (beginning of text, end of text, others)
    "chatml": ("<s>", "<|im_end|>", ["<|im_start|>"]),
    "smollm2": ("<|im_start|>", "<|im_end|>", ["<|endoftext|>"]),
    "qwen2_5": ("<|endoftext|>", "<|im_end|>", ["<|im_start|>"]),
    "qwen3": ("<|endoftext|>", "<|im_end|>", ["<|im_start|>"]),
    "llama2": ("<s>", "</s>", []),
    "llama3": ("<|begin_of_text|>", "<|end_of_text|>", ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]),
    "llama3_1": (
        "<|begin_of_text|>",
        "<|eot_id|>",
        ["<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"],
    ),
    "mistral_v1": ("<s>", "</s>", []),
    "mistral_v3": ("<s>", "</s>", ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]),
    "gemma": ("<bos>", "<eos>", ["<start_of_turn>", "<end_of_turn>"]),
    "zephyr": ("<s>", "</s>", []),
    "phi3": ("<s>", "<|endoftext|>", ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]),
    "deepseek_r1": (
        "<|begin_of_sentence|>",
        "<|end_of_sentence|>",
        [f"<|{name}|>" for name in ("User", "Assistant", "tool_calls_begin", "tool_call_begin", "tool_sep")]
        + [f"<|tool_{name}|>" for name in ("call_end", "calls_end", "outputs_begin", "output_begin")]
        + [f"<|tool_{name}|>" for name in ("output_end", "outputs_end")],
    ),
    "plain_text": ("<s>", "</s>", []),
    "hides_assistant": ("<s>", "<|end|>", ["<|user|>", "<|assistant|>"]),
}
UNSPECIAL_ADDED_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # as in Qwen's vocabularies


def template_text(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


def byte_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes with the special tokens and the chat template of that name."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in UNSPECIAL_ADDED_TOKENS])
    bos, eos, others = SPECIAL_TOKENS[name]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        additional_special_tokens=others,
        chat_template=template_text(name),
        clean_up_tokenization_spaces=False,
        name_or_path=name,
    )
