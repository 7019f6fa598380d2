"""Images as vLLM takes them from this project: our token ids, our pixels and our digests, with nothing made again.

Given images and token ids, vLLM would expand placeholders that are expanded already, and process the images by a
processor of its own. An engine input carries what the policy is given; the digests are the keys of vLLM's caches, so
that the samples of a group, and all turns of a rollout, encode an image once.
"""

import importlib
import importlib.util
import sys
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers

from nemo_rl.config.images import MAX_CONVERSATION_IMAGES, VISION_FAMILIES
from nemo_rl.data.vision import image_only
from nemo_rl.image_features import ImageFeatures, PlacedImage

ARGUMENTS: dict[str, Any] = {
    "mm_device_do_normalize": False,  # else Qwen's classes normalize pixels once more
    "skip_mm_profiling": True,
    "mm_processor_cache_gb": 0,  # nothing is processed here
}


def vision_arguments(model_type: str) -> dict[str, Any]:
    """Return the arguments of vLLM's AsyncEngineArgs for a model that sees."""
    limits = {
        "image": MAX_CONVERSATION_IMAGES,
        **({} if VISION_FAMILIES[model_type].tower == "tiles" else {"video": 0}),
    }
    return {**ARGUMENTS, "limit_mm_per_prompt": limits}


def engine_input(token_ids: list[int], images: Sequence[PlacedImage]) -> Any:
    """Return vLLM's input for a prompt with images."""
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems

    items = MultiModalKwargsItems({"image": [_item(placed.features) for placed in images]})
    hashes = {"image": [placed.features.digest for placed in images]}
    return mm_input(token_ids, items, hashes, {"image": [_place(placed) for placed in images]})


def _item(features: ImageFeatures) -> Any:
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    tensors: Any = {name: torch.from_numpy(np.array(array)) for name, array in features.arrays.items()}
    rows = torch.tensor([len(tensors["pixel_values"])])
    fields = {
        name: MultiModalFieldConfig.batched("image", keep_on_cpu=True)
        if name == "image_grid_thw"
        else MultiModalFieldConfig.flat_from_sizes("image", rows)
        for name in tensors
    }
    if "image_grid_thw" not in tensors:
        tensors["num_patches"] = rows
        fields["num_patches"] = MultiModalFieldConfig.batched("image", keep_on_cpu=True)
    (item,) = MultiModalKwargsItems.from_hf_inputs(tensors, fields)["image"]
    return item


def _place(placed: PlacedImage) -> Any:
    from vllm.multimodal.inputs import PlaceholderRange

    first, length = placed.positions[0], placed.positions[-1] - placed.positions[0] + 1
    if length == len(placed.positions):
        return PlaceholderRange(offset=first, length=length)
    is_embed = torch.zeros(length, dtype=torch.bool)  # text stands between the tiles
    is_embed[torch.tensor(placed.positions) - first] = True
    return PlaceholderRange(offset=first, length=length, is_embed=is_embed)


def needs_prepared_process(model_type: str) -> bool:
    """Return whether vLLM can load models of a type only in a process that `prepare_classes` has prepared."""
    return VISION_FAMILIES[model_type].video_processor_class is not None


def prepare_classes(model_type: str) -> None:
    """Let vLLM load a model whose processor reads videos without torchvision: by one that does not, in this process.

    For Qwen's, vLLM 0.32 imports one function from a module of transformers that needs torchvision; the module for
    Pillow has the same function. Registered by its class, a model is not inspected in a process of its own, which
    lacks all this.
    """
    processor = VISION_FAMILIES[model_type].video_processor_class
    if processor is None:
        return
    name = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
    if importlib.util.find_spec("torchvision") is None and name not in sys.modules:
        pillow = importlib.import_module("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
        stand_in: Any = types.ModuleType(name)
        stand_in.smart_resize, stand_in.Qwen2VLImageProcessor = pillow.smart_resize, pillow.Qwen2VLImageProcessorPil
        sys.modules[name] = stand_in
    from vllm import ModelRegistry

    module: Any = importlib.import_module(f"vllm.model_executor.models.{model_type}")
    setattr(module, processor, image_only(getattr(transformers, processor)))
    class_name = processor.replace("Processor", "ForConditionalGeneration")
    ModelRegistry.register_model(class_name, getattr(module, class_name))
