"""Names of a model's tensors in its files: transformers renames some on loading, and stacks a layer's experts.

Files and engines have one tensor per expert and projection, e.g. `mlp.experts.3.gate_proj.weight`; the module holds
`mlp.experts.gate_up_proj` [experts, rows, columns]. Every weight travels under its name in files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

_known: WeakKeyDictionary[PreTrainedModel, tuple[dict[str, tuple[int, ...]], Mapping[str, "FilePart"] | None]]
_known = WeakKeyDictionary()
HALVES = 2  # an expert's rows: its gate and up projections, or one tensor of both


@dataclass(frozen=True, slots=True)
class FilePart:
    """The part of a model's tensor that one tensor of its files holds."""

    tensor: str  # the model's name
    expert: int | None = None  # None: the whole tensor
    halves: tuple[int, int] = (0, HALVES)  # first and last + 1 of the halves of the expert's rows

    def rows(self, num_rows: int) -> slice:
        """Return the part's rows among those of its expert."""
        first, last = self.halves
        return slice(num_rows * first // HALVES, num_rows * last // HALVES)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the part of the model's tensor."""
        return tensor if self.expert is None else tensor[self.expert, self.rows(tensor.shape[1])]


def file_parts(model: PreTrainedModel) -> Mapping[str, FilePart] | None:
    """Return the part of the model that each tensor of its files holds, by the file's name; needs no values.

    None for a model whose files hold anything but renamed tensors and whole rows of single experts. They are found
    once, unless the model gets other tensors: each refit asks for them.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    known = _known.get(model)
    if known is None or known[0] != shapes:
        known = _known[model] = shapes, _find_parts(model, shapes)
    return known[1]


def _find_parts(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, FilePart] | None:
    """Let transformers itself convert numbers that tell where they come from."""
    names, probes, first = list(shapes), dict[str, torch.Tensor](), 0
    starts: list[int] = []
    for name, shape in shapes.items():
        size = shape[0] * HALVES if _is_stacked(name, shape) else 1
        numbers = torch.arange(first, first + size)
        probes[name] = numbers.view(shape[0], HALVES, 1) if _is_stacked(name, shape) else numbers
        starts.append(first)
        first += size
    parts: dict[str, FilePart] = {}
    for file_name, found in revert_weight_conversion(model, probes).items():
        index = int(torch.searchsorted(torch.tensor(starts), int(found.flatten()[0]), right=True)) - 1
        part = _read_probe(found, names[index], starts[index], shapes[names[index]])
        if part is None:
            return None
        parts[file_name] = part
    return parts


def parts_by_tensor(parts: Mapping[str, FilePart]) -> dict[str, dict[str, FilePart]]:
    """Return the files' names and parts of each of the model's tensors."""
    found: dict[str, dict[str, FilePart]] = {}
    for name, part in parts.items():
        found.setdefault(part.tensor, {})[name] = part
    return found


def _is_stacked(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and ".experts." in name


def _read_probe(found: torch.Tensor, tensor: str, start: int, shape: tuple[int, ...]) -> FilePart | None:
    """Return the part that a converted probe names; None if it is not whole rows of one expert."""
    numbers = (found.flatten() - start).tolist()
    size = shape[0] * HALVES if _is_stacked(tensor, shape) else 1
    if numbers == list(range(size)):
        return FilePart(tensor)
    expert, half = divmod(numbers[0], HALVES)
    is_expert = numbers == list(range(numbers[0], numbers[0] + len(numbers))) and half + len(numbers) <= HALVES
    return FilePart(tensor, expert, (half, half + len(numbers))) if is_expert else None
