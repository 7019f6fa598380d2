"""Models that see: how the features of images take the place of their tokens' embeddings, for policy and HF engine.

Images are marked by the position of their tokens, not by the tokens' ids: a model may sample a placeholder, which then
is a token like any other, as it is to vLLM. The tower runs once per call, over each distinct image of it.
B rows, T tokens, F rows of features, H hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from nemo_rl.config.images import VISION_FAMILIES
from nemo_rl.image_features import ImageFeatures, ImageTable

MROPE_AXES = 3  # time, height and width
TILE_ARRAYS = ("pixel_values", "pixel_attention_mask")
DEEPER_FEATURES = "deeper_features"  # input of a model, which `_hand_over_deeper_features` takes


def sees(config: PreTrainedConfig) -> bool:
    """Return whether a model of this configuration reads images."""
    return config.model_type in VISION_FAMILIES


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the class of transformers that loads the model with all of its parts."""
    return AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM


def vision_tower(model: PreTrainedModel) -> nn.Module:
    """Return the tower of a model that sees, without its projector."""
    return tower_call(model.config).module(model.base_model)


def frozen_vision_names(model: PreTrainedModel) -> set[str]:
    """Return the names of the tower's parameters; Qwen's projectors, parts of its tower, are left out."""
    tower = {id(parameter) for parameter in vision_tower(model).parameters()}
    named = model.named_parameters()
    return {name for name, parameter in named if id(parameter) in tower and "merger" not in name}


def shrink_tower(config: PreTrainedConfig) -> None:
    """Leave one layer of the tower of a configuration."""
    tower_call(config).shrink(config.vision_config)


class TowerCall(Protocol):
    """Call of the tower of one family."""

    has_axes: bool  # whether positions of tokens have MROPE_AXES

    def module(self, base: Any) -> nn.Module:
        """Return the tower of the model without its head."""
        ...

    def features(self, base: Any, images: Sequence[ImageFeatures]) -> list[torch.Tensor]:
        """Return the features of images, in order: the embeddings [F, H], then what is added after layers 0, 1, ..."""
        ...

    def shrink(self, vision: Any) -> None:
        """Leave one layer of the tower's configuration."""
        ...

    def example(self, config: PreTrainedConfig) -> ImageFeatures:
        """Return an image without content, for a rank that has none."""
        ...


class TileTower:
    """Idefics3 and SmolVLM: an image is one tile or several."""

    has_axes = False

    def module(self, base: Any) -> nn.Module:
        return base.vision_model

    def shrink(self, vision: Any) -> None:
        vision.num_hidden_layers = 1

    def features(self, base: Any, images: Sequence[ImageFeatures]) -> list[torch.Tensor]:
        pixels, mask = (_stack_tiles([image.arrays[name] for image in images]) for name in TILE_ARRAYS)
        device = base.device
        found = base.get_image_features(pixels.unsqueeze(0).to(device), mask.unsqueeze(0).to(device).bool())
        return [found.pooler_output.flatten(0, 1)]

    def example(self, config: PreTrainedConfig) -> ImageFeatures:
        side = config.vision_config.image_size
        arrays = {
            "pixel_values": np.ones((1, 3, side, side), np.float32),
            "pixel_attention_mask": np.ones((1, side, side), np.int64),
        }
        return ImageFeatures("", arrays, 0)


class PatchTower:
    """Qwen2.5-VL: an image is a row of patches and the grid that they form."""

    has_axes = True

    def module(self, base: Any) -> nn.Module:
        return base.visual

    def shrink(self, vision: Any) -> None:
        vision.depth, vision.fullatt_block_indexes = 1, [0]

    def features(self, base: Any, images: Sequence[ImageFeatures]) -> list[torch.Tensor]:
        return [torch.cat(self._output(base, images).pooler_output)]

    def _output(self, base: Any, images: Sequence[ImageFeatures]) -> Any:
        pixels, grids = (
            torch.cat([_tensor(image.arrays[name]) for image in images]).to(base.device)
            for name in ("pixel_values", "image_grid_thw")
        )
        return base.get_image_features(pixels, grids)

    def example(self, config: PreTrainedConfig) -> ImageFeatures:
        vision: Any = config.vision_config
        side = vision.spatial_merge_size
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        arrays = {"pixel_values": np.ones((side**2, width), np.float32), "image_grid_thw": np.array([[1, side, side]])}
        return ImageFeatures("", arrays, 0)


class DeepstackTower(PatchTower):
    """Qwen3-VL: features of inner layers of the tower are added after the first layers of the decoder (2406.04334)."""

    def shrink(self, vision: Any) -> None:
        vision.depth, vision.deepstack_visual_indexes = 1, [0]

    def features(self, base: Any, images: Sequence[ImageFeatures]) -> list[torch.Tensor]:
        found = self._output(base, images)
        return [torch.cat(parts) for parts in (found.pooler_output, *found.deepstack_features)]


TOWERS: dict[str, TowerCall] = {"tiles": TileTower(), "patches": PatchTower(), "deepstack": DeepstackTower()}


def tower_call(config: PreTrainedConfig) -> TowerCall:
    """Return the call of the tower of a model that `sees`."""
    return TOWERS[VISION_FAMILIES[config.model_type].tower]


@dataclass(frozen=True, slots=True)
class RowImages:
    """The images of rows of tokens."""

    rows: torch.Tensor  # [B, T] int64: `batch.IMAGE_ROWS`
    table: ImageTable


class ImageEmbedder:
    """Makes a model's inputs from tokens and images.

    Args:
        model: one that `sees`.
        always_runs: run the tower, over an example, also if there is no image: ranks that gather its weights
            together call it equally often.
    """

    def __init__(self, model: PreTrainedModel, *, always_runs: bool = False) -> None:
        self._model = model
        self._base: Any = model.base_model
        self._tower = tower_call(model.config)
        if isinstance(self._tower, DeepstackTower):
            self._base.language_model.register_forward_pre_hook(_hand_over_deeper_features, with_kwargs=True)
        self.always_runs = always_runs
        self.num_towered = 0  # images that the tower was given, for tests

    def embed(self, token_ids: torch.Tensor, images: RowImages | None) -> dict[str, Any]:
        """Return a model's inputs in place of tokens: embeddings [B, T, H], those of placeholders replaced by features.

        With a tower of several features the inputs also have the rest of them.
        """
        embeddings: torch.Tensor = self._model.get_input_embeddings()(token_ids)
        is_image = None if images is None else images.rows >= 0
        if images is None or is_image is None or not is_image.any():
            if self.always_runs:
                example = self._tower.features(self._base, [self._tower.example(self._model.config)])
                embeddings = embeddings + 0 * torch.stack([features.sum() for features in example]).sum()
            return {"inputs_embeds": embeddings}
        starts = torch.tensor(images.table.starts, device=token_ids.device)
        rows = images.rows[is_image]
        numbers, of_row = torch.unique(torch.searchsorted(starts, rows, right=True) - 1, return_inverse=True)
        used = [images.table.images[number] for number in numbers.tolist()]
        self.num_towered += len(used)
        features, *deeper = self._tower.features(self._base, used)
        sizes = torch.tensor([image.num_tokens for image in used], device=token_ids.device)
        if len(features) != int(sizes.sum()):
            raise ValueError(f"the vision tower made {len(features)} rows of features for {int(sizes.sum())} tokens")
        own = rows - starts[numbers][of_row] + (sizes.cumsum(0) - sizes)[of_row]
        embeddings = embeddings.masked_scatter(is_image.unsqueeze(-1), features[own].to(embeddings.dtype))
        rest = {DEEPER_FEATURES: (is_image, [each[own] for each in deeper])} if deeper else {}
        return {"inputs_embeds": embeddings, **rest}

    def positions(
        self, token_ids: torch.Tensor, lengths: Sequence[int], images: RowImages | None
    ) -> torch.Tensor | None:
        """Return the positions [3, B, T] of right-padded rows if the family has axes for images, else None."""
        if not self._tower.has_axes:
            return None
        width = token_ids.shape[1]
        positions = torch.arange(width, device=token_ids.device).expand(MROPE_AXES, len(token_ids), width).clone()
        if images is None:
            return positions
        starts = torch.tensor(images.table.starts, device=token_ids.device)
        for index, (row, length) in enumerate(zip(images.rows, lengths, strict=True)):
            own = row[:length]
            if not (own >= 0).any():
                continue
            numbers = torch.searchsorted(starts, own[own >= 0], right=True) - 1
            grids = [images.table.images[n].arrays["image_grid_thw"] for n in _first_of_runs(own, numbers, starts)]
            found, _ = self._base.get_rope_index(
                token_ids[index : index + 1, :length],
                mm_token_type_ids=(own >= 0).int().unsqueeze(0),
                image_grid_thw=torch.cat([_tensor(grid) for grid in grids]).to(token_ids.device),
            )
            positions[:, index, :length] = found[:, 0]
        return positions


def _hand_over_deeper_features(_: nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Give a decoder's inputs the form of transformers, whose own would find images by their tokens' ids."""
    if DEEPER_FEATURES in inputs:
        inputs["visual_pos_masks"], inputs["deepstack_visual_embeds"] = inputs.pop(DEEPER_FEATURES)
    return args, inputs


def _first_of_runs(rows: torch.Tensor, numbers: torch.Tensor, starts: torch.Tensor) -> list[int]:
    """Return the number of each image of a row in order: an image begins with its first row of features."""
    begins = rows[rows >= 0] == starts[numbers]
    return numbers[begins].tolist()


def _stack_tiles(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    """Return the tiles of all images [n, ...], padded on the right and below to the largest, as processors do."""
    height, width = (max(array.shape[axis] for array in arrays) for axis in (-2, -1))
    padded = [
        np.pad(array, [(0, 0)] * (array.ndim - 2) + [(0, height - array.shape[-2]), (0, width - array.shape[-1])])
        for array in arrays
    ]
    return _tensor(np.concatenate(padded))


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array) if array.flags.writeable else array.copy())
