"""`MegatronTeacher`: a frozen model on one rank of Megatron-core, which is asked for log-probs."""

from collections.abc import Iterator
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedModel

from nemo_rl.interfaces import RequiredScores, TokenScores
from nemo_rl.policy.hf_model import load_config, load_model
from nemo_rl.policy.megatron.checks import check_model
from nemo_rl.policy.megatron.parallel import make_groups
from nemo_rl.policy.megatron.pipeline import score
from nemo_rl.policy.megatron.stages import frozen_stage
from nemo_rl.policy.micro_batches import teacher_batches
from nemo_rl.policy.teacher import BaseTeacher
from nemo_rl.types import TrainingBatch


class MegatronTeacher(BaseTeacher):
    """A teacher by tensor, pipeline and data parallelism, in a process of its own.

    Arguments and errors are those of `BaseTeacher`.
    """

    def _make(self, model_path: str, *, temperature: float) -> None:
        config, section = self.config, self._section
        model_config = load_config(model_path, config.hf_config_overrides, section=section)
        check_model(config.megatron_cfg, model_config, key=f"{section}.megatron_cfg")
        make_groups(self.layout, self.device)
        model = load_model(model_path, config.hf_config_overrides, section=section)
        self.module = frozen_stage(model, config, temperature=temperature, device=self.device)
        self._model: PreTrainedModel = cast(nn.Module, model).to("meta")  # pyright: ignore[reportAttributeAccessIssue]

    def _scores(
        self, module: nn.Module, batch: TrainingBatch, wanted: RequiredScores
    ) -> Iterator[tuple[torch.Tensor, TokenScores]]:
        size = teacher_batches(self.config, self._section)
        return score(module, batch, wanted, size=size, device=self.device, layout=self.layout)

    def _move(self, device: torch.device) -> None:
        if self.device.type == "cpu":
            return
        self.module.to(device)
        torch.cuda.empty_cache()
