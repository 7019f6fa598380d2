"""Tiny vision-language models with random weights, their processors and pictures, all made offline."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nemo_rl.config.images import ImagesConfig
from nemo_rl.data.images import ImageReader
from nemo_rl.data.vision import image_only
from nemo_rl.types import ImagePart

# tiles: an Idefics3 whose images are cut into tiles, as SmolVLM's are
KINDS = ("idefics3", "tiles", "smolvlm", "qwen2_5_vl", "qwen3_vl")
QWEN_PATCHES = {"qwen2_5_vl": 14, "qwen3_vl": 16}  # pixels of a patch's side
END, PAD = "<|end|>", "<|pad|>"
QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TILE_TOKENS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
TILE_TOKENS += [f"<row_{i}_col_{j}>" for i in range(1, 5) for j in range(1, 5)]
QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
TEXT = {
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.15,
    "rms_norm_eps": 1e-6,
}  # fmt: skip


def picture(seed: int, width: int = 56, height: int = 56) -> ImagePart:
    """Return a picture of random colours."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return ImageReader(ImagesConfig()).check(png(Image.fromarray(pixels)), "picture")


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def make_tokenizer(special: list[str], template: str) -> tf.PreTrainedTokenizerFast:
    """Return a tokenizer of 256 bytes, without merges, and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, pad_token=PAD, additional_special_tokens=special, chat_template=template
    )


def save_vision_model(kind: str, path: Path) -> tuple[Any, Any]:
    """Save a model of one of KINDS with its processor; return both."""
    processor = _make_qwen_processor(kind) if kind in QWEN_PATCHES else _make_tile_processor(kind)
    torch.manual_seed(0)
    tokenizer = processor.tokenizer
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in tokenizer.all_special_tokens}
    text = TEXT | {"vocab_size": len(tokenizer) + len(tokenizer) % 2, "pad_token_id": ids[PAD], "bos_token_id": None}
    text["eos_token_id"] = ids[END]
    model = _make_qwen(kind, text, ids) if kind in QWEN_PATCHES else _make_tiles(kind, text, ids)
    model = model.float().eval()
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return model, processor


def _make_tile_processor(kind: str) -> Any:
    splits, is_smol = kind != "idefics3", kind == "smolvlm"
    edge = {"longest_edge": 64 if splits else 32}
    image_class = tf.SmolVLMImageProcessorPil if is_smol else tf.Idefics3ImageProcessorPil
    images = image_class(size=edge, max_image_size={"longest_edge": 32}, do_image_splitting=splits)
    template = TEMPLATE.replace("IMAGE", "<image>")
    tokenizer = make_tokenizer(TILE_TOKENS, template)
    processor_class = image_only(tf.SmolVLMProcessor) if is_smol else tf.Idefics3Processor
    return processor_class(images, tokenizer, image_seq_len=4, chat_template=template)


def _make_tiles(kind: str, text: dict[str, Any], ids: dict[str, int]) -> Any:
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
              "image_size": 32, "patch_size": 8, "initializer_range": 0.15}  # fmt: skip
    name = "SmolVLM" if kind == "smolvlm" else "Idefics3"
    config = getattr(tf, f"{name}Config")(
        vision_config=vision, text_config=text | {"model_type": "llama"}, scale_factor=2, image_token_id=ids["<image>"],
        pad_token_id=ids[PAD], tie_word_embeddings=False,
    )  # fmt: skip
    return getattr(tf, f"{name}ForConditionalGeneration")(config)


def _make_qwen_processor(kind: str) -> Any:
    patch = QWEN_PATCHES[kind]
    side = 2 * patch
    images = tf.Qwen2VLImageProcessorPil(
        size={"shortest_edge": side**2, "longest_edge": 64 * side**2}, patch_size=patch, merge_size=2,
        temporal_patch_size=2,
    )  # fmt: skip
    template = TEMPLATE.replace("IMAGE", QWEN_MARK)
    processor_class = tf.Qwen2_5_VLProcessor if kind == "qwen2_5_vl" else tf.Qwen3VLProcessor
    return image_only(processor_class)(images, make_tokenizer(QWEN_TOKENS, template), chat_template=template)


def _make_qwen(kind: str, text: dict[str, Any], ids: dict[str, int]) -> Any:
    tokens = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 128,
              "initializer_range": 0.15, "patch_size": QWEN_PATCHES[kind]}  # fmt: skip
    if kind == "qwen2_5_vl":
        vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
        parts: dict[str, Any] = {"vision_config": vision, "text_config": text | {"rope_parameters": rope}, **tokens}
        return tf.Qwen2_5_VLForConditionalGeneration(tf.Qwen2_5_VLConfig(**parts))
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    text = text | {"rope_parameters": rope | {"mrope_interleaved": True}}
    parts = {"vision_config": vision, "text_config": text, **tokens}
    return tf.Qwen3VLForConditionalGeneration(tf.Qwen3VLConfig(**parts))
