"""`policy.dtensor_cfg.lora_cfg`: train low-rank adapters in the place of the weights, under NeMo-RL's names."""

from typing import Literal

from pydantic import Field

from nemo_rl.config.section import Section


class LoraAdapterConfig(Section):
    """W + alpha / dim * B A of every adapted layer (LoRA, arXiv 2106.09685): B and A are trained, W is frozen.

    A name of a layer is its last part (`q_proj`), its whole name, or a pattern of the whole one (`*.layers.0.*`).
    """

    enabled: bool = False
    target_modules: list[str] = Field(default_factory=list)  # names of linear layers; none: all but the output layer
    exclude_modules: list[str] = Field(default_factory=list)  # of those, the ones that are left out
    match_all_linear: bool = False  # says in words what empty target_modules mean
    dim: int = Field(default=8, gt=0)  # the rank of B A
    alpha: int = Field(default=32, gt=0)
    lora_A_init: Literal["xavier", "kaiming"] = "xavier"  # normal or uniform values; B begins with zeros
    save_merged: bool = True  # checkpoints hold the merged model in weights/ too; false: the adapter alone
