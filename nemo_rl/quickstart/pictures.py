"""The quickstart of images: pictures of one to four squares, and an untrained model that is to count them.

The picture alone tells the number. Loads without torch: the dataset `counted_squares` is an entry that configurations
import.
"""

import base64
import io
import random
from collections.abc import Iterator
from pathlib import Path

from nemo_rl.config.data import DatasetConfig, DatasetEntry
from nemo_rl.config.images import ImagesConfig
from nemo_rl.data.rows import Row
from nemo_rl.errors import ConfigError

CELLS, CELL = 4, 8  # cells a side, pixels of a cell's side
MAX_COUNT = 4
QUESTION = "How many squares?"
ROWS = 1000  # unless `size` says otherwise
KWARGS = ("shuffled",)


def draw_squares(count: int, rng: random.Random) -> bytes:
    """Return a PNG of `count` bright squares of random colours in random cells on a dark ground."""
    from PIL import Image, ImageDraw

    side = CELLS * CELL
    image = Image.new("RGB", (side, side), _colour(rng, 0, 60))
    pencil = ImageDraw.Draw(image)
    for cell in rng.sample(range(CELLS**2), count):
        y, x = (CELL * part for part in divmod(cell, CELLS))
        pencil.rectangle((x + 1, y + 1, x + CELL - 2, y + CELL - 2), _colour(rng, 160, 255))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def _colour(rng: random.Random, low: int, high: int) -> tuple[int, int, int]:
    return rng.randint(low, high), rng.randint(low, high), rng.randint(low, high)


def _load_rows(section: DatasetConfig, seed: int) -> Iterator[Row]:
    """Yield `size` rows of a seed; with `kwargs.shuffled` each has the picture of another, as a control."""
    if unknown := sorted(section.kwargs.keys() - set(KWARGS)):
        raise ConfigError("kwargs", unknown, f"allowed: {', '.join(KWARGS)}")
    rng = random.Random(seed)
    counts = [rng.randint(1, MAX_COUNT) for _ in range(section.size or ROWS)]
    shown = list(counts)
    if section.kwargs.get("shuffled"):
        rng.shuffle(shown)
    for count, drawn in zip(counts, shown, strict=True):
        url = f"data:image/png;base64,{base64.b64encode(draw_squares(drawn, rng)).decode()}"
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
        yield {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": str(count)}]}


COUNTED_SQUARES = DatasetEntry(
    DatasetConfig, make=_load_rows, defaults=DatasetConfig(images=ImagesConfig(directories=[]))
)


def save_model(directory: Path, seed: int) -> None:
    """Save a model of 0.2M random parameters that sees, of type Idefics3, with its processor."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3ImageProcessorPil,
        Idefics3Processor,
        PreTrainedTokenizerFast,
    )

    image, end, pad, unknown = "<image>", "<|end|>", "<|pad|>", "<|unknown|>"
    marks = ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>", image]
    texts = ["How", " many", " squares", "?", "user:", "assistant:", *map(str, range(1, MAX_COUNT + 1))]
    vocabulary = {token: number for number, token in enumerate([pad, end, unknown, *marks, *texts])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    pieces = "|".join(sorted((text.replace("?", "\\?") for text in texts), key=len, reverse=True))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{pieces}|[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    template = (
        "{% for m in messages %}{{ m['role'] + ':' }}{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for part in m['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}"
        "{% endif %}{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=end, pad_token=pad, unk_token=unknown, additional_special_tokens=marks,
        clean_up_tokenization_spaces=False, chat_template=template,
    )  # fmt: skip
    side = {"longest_edge": CELLS * CELL}
    images = Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=template).save_pretrained(directory)
    text = {
        "model_type": "llama", "vocab_size": len(vocabulary), "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "max_position_embeddings": 64, "tie_word_embeddings": False, "bos_token_id": None,
        "eos_token_id": vocabulary[end], "pad_token_id": vocabulary[pad],
    }  # fmt: skip
    vision = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": CELLS * CELL, "patch_size": CELL,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = Idefics3Config(
            vision_config=vision, text_config=text, scale_factor=2, image_token_id=vocabulary[image],
            pad_token_id=vocabulary[pad], tie_word_embeddings=False,
        )  # fmt: skip
        Idefics3ForConditionalGeneration(config).float().save_pretrained(directory)
