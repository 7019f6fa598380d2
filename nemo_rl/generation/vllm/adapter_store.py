"""The adapters of an engine's worker, in its memory: vLLM 0.32 loads them from files alone. Imports vLLM."""

from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.utils.torch_utils import PIN_MEMORY

from nemo_rl.generation.vllm.adapters import adapter_request
from nemo_rl.weight_manifests import split_policy_index


class AdapterStore:
    """Keeps each adapter's tensors on the host, from which vLLM loads it, also again: it evicts adapters, and a refit
    of the base model drops all.

    Tensors have the names of peft's files. B is multiplied by its scale already: vLLM would scale it in place, once
    per load.
    """

    def __init__(self, runner: Any) -> None:
        self._manager = runner.lora_manager
        self._dtype: torch.dtype = self._manager.lora_config.lora_dtype
        mapper = getattr(self._manager._adapter_manager.model, "hf_to_vllm_mapper", None)
        # name of a file -> layer of vLLM's model, and whether it is A; the same names come with every version
        self._parse = cache(partial(parse_fine_tuned_lora_name, weights_mapper=mapper and mapper.get_rename_mapper()))
        self._kept: dict[int, dict[str, torch.Tensor]] = {}
        self._manager._load_adapter = self._load

    def keep(self, number: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy and load the adapters of a version, that of the first policy under `number` and further ones under those
        that follow; raises ValueError if the model has no such layers."""
        copied: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors:
            index, own = split_policy_index(name)
            copied.setdefault(number + index, {})[own] = self._copy(tensor)
        for each, own_tensors in copied.items():
            self._keep_one(each, own_tensors)

    def _keep_one(self, number: int, tensors: dict[str, torch.Tensor]) -> None:
        self._kept[number] = tensors
        self._manager.add_adapter(adapter_request(number))
        layers = self._manager._adapter_manager
        if unknown := sorted(layers.get_adapter(number).loras.keys() - layers.modules.keys()):
            raise ValueError(f"vLLM's model has no {unknown[0]} to adapt ({len(unknown)} such layers)")

    def drop(self, numbers: Sequence[int]) -> None:
        """Forget adapters that no request uses."""
        for number in numbers:
            self._kept.pop(number)
            self._manager.remove_adapter(number)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        copied = tensor.detach().to("cpu", self._dtype, copy=True)
        return copied.pin_memory() if PIN_MEMORY else copied

    def _load(self, request: LoRARequest) -> LoRAModel:
        """Return the layers of a kept adapter: vLLM packs and changes these objects, and leaves the tensors as they
        are."""
        parts: dict[str, dict[bool, torch.Tensor]] = {}  # A (True) and B of each layer
        for name, tensor in self._kept[request.lora_int_id].items():
            layer, is_a = self._parse(name)
            parts.setdefault(layer, {})[is_a] = tensor
        rank = len(next(iter(parts.values()))[True])
        layers = {name: LoRALayerWeights(name, rank, rank, own[True], own[False]) for name, own in parts.items()}
        return LoRAModel(request.lora_int_id, rank, layers)
