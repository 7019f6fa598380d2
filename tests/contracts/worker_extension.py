"""Mutations of the engine's half of a refit; vLLM's worker imports this module."""

import torch

from nemo_rl.generation.vllm.worker import WeightLoadingExtension


class LoadingWithSkippableRepair(WeightLoadingExtension):
    """Loads as the product does, or forgets the output layer, as vLLM's own reload does on a CPU."""

    repairs_output_layers = True

    def repair_output_layers(self, repairs: bool) -> None:
        self.repairs_output_layers = repairs

    def repack_output_layers(self, model: torch.nn.Module) -> None:
        if self.repairs_output_layers:
            super().repack_output_layers(model)
