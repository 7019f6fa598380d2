"""A frozen model of the policy's backend: it is asked for log-probs, and has neither optimizer nor gradients."""

from abc import abstractmethod
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from nemo_rl.config.teacher import TeacherConfig
from nemo_rl.distributed.device import resolve_device
from nemo_rl.interfaces import RequiredScores, TokenScores, TopK
from nemo_rl.policy.hf_model import load_config, load_model
from nemo_rl.policy.logprobs import CausalLogprobs
from nemo_rl.policy.micro_batches import teacher_batches
from nemo_rl.policy.ranks import ALONE, RankLayout
from nemo_rl.policy.reading import ReadingRank, scores_in_parts
from nemo_rl.policy.sharding import frozen_needs_sharding, shard
from nemo_rl.policy.tensor_parallel import check_tensor_parallel
from nemo_rl.policy.thread import PolicyThread
from nemo_rl.types import TrainingBatch


class BaseTeacher(ReadingRank):
    """The teacher on one rank of a layout, whichever backend computes; weights are in `precision`, dropout is off.

    Args:
        config: a section `teacher`; `layout`, not the section, says how many ranks there are.
        section: its key, for errors.
        layout: this rank's place, and how it finds the others.
        model_path: a Hugging Face name or a folder that every rank can read.
        temperature: the logits are divided by it: that of the policy's sampling.

    Raises:
        ConfigError: a model, override, device or layout that cannot be had.
        PolicyError: the other ranks did not come before the deadline.
    """

    def __init__(
        self, config: TeacherConfig, *, section: str, layout: RankLayout, model_path: str, temperature: float
    ) -> None:
        self.config = config
        self._section = section
        self.layout = layout
        self.device = resolve_device(config.device)
        self._make(model_path, temperature=temperature)

    @abstractmethod
    def _make(self, model_path: str, *, temperature: float) -> None:
        """The model: the last step of the constructor."""


class RankTeacher(BaseTeacher):
    """A teacher by FSDP2 and DTensor. FSDP2 holds the weights among several ranks and for `cpu_offload`, else they are
    whole. Arguments and errors are those of `BaseTeacher`."""

    def _make(self, model_path: str, *, temperature: float) -> None:
        config, layout, section = self.config, self.layout, self._section
        if layout.tensor_parallel_size > 1:
            model_config = load_config(model_path, config.hf_config_overrides, section=section)
            check_tensor_parallel(layout.tensor_parallel_size, model_config, section=section)
        self._model = load_model(model_path, config.hf_config_overrides, section=section)
        module = CausalLogprobs(
            self._model,
            temperature=temperature,
            chunk_size=config.logprob_chunk_size,
            packing_key=f"{section}.sequence_packing.enabled" if config.sequence_packing.enabled else None,
        )
        self.module = module.requires_grad_(False)
        if config.precision == "bfloat16":  # parameters alone: buffers such as rotary frequencies stay float32
            for parameter in self.module.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        if frozen_needs_sharding(config, layout, self.device):
            shard(self.module, config, layout, self.device)  # and bring it to the device, or leave it off
        else:
            self.module.to(self.device)

    def _scores(
        self, module: nn.Module, batch: TrainingBatch, wanted: RequiredScores
    ) -> Iterator[tuple[torch.Tensor, TokenScores]]:
        size = teacher_batches(self.config, self._section)
        return scores_in_parts(module, batch, wanted, size=size, device=self.device, layout=self.layout)

    def _move(self, device: torch.device) -> None:
        if self.device.type == "cpu" or self.config.dtensor_cfg.cpu_offload:
            return
        self.module.to(device)
        torch.cuda.empty_cache()


class LocalTeacher:
    """A `RankTeacher` in this process, on a thread of its own; satisfies `interfaces.TeacherConfig`."""

    def __init__(self, config: TeacherConfig, *, layout: RankLayout = ALONE, **arguments: Any) -> None:
        """`arguments` are those of `BaseTeacher`."""
        self._thread = PolicyThread("teacher")
        try:
            self._rank = self._thread.run_blocking(partial(RankTeacher, config, layout=layout, **arguments))
        except BaseException:
            self._thread.close()
            raise

    async def logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        return await self._thread.run(self._rank.logprobs, batch)

    async def topk_logprobs(self, batch: TrainingBatch, k: int) -> TopK:
        return await self._thread.run(self._rank.topk_logprobs, batch, k)

    async def offload(self) -> None:
        await self._thread.run(self._rank.offload)

    async def onload(self) -> None:
        await self._thread.run(self._rank.onload)

    async def close(self) -> None:
        """Wait for the running call and end the thread."""
        self._thread.close()
