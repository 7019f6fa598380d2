"""The section of LoRA, of every backend that has adapters. Imports no torch."""

from typing import Literal

from pydantic import Field

from nemo_rl.config.kinds import Section

LORA_KEY = "policy.dtensor_cfg.lora_cfg"  # FSDP2's; other backends name their own


class LoraAdapterConfig(Section):
    """W + alpha / dim * B A of every adapted layer (LoRA, arXiv 2106.09685): B and A are trained, W is frozen.

    A layer is named by its last part (`q_proj`), its full name, or a pattern of the full name (`*.layers.0.*`).
    """

    enabled: bool = False  # train adapters alone; false: all weights
    target_modules: list[str] = Field(default_factory=list)  # linear layers; empty: all but the output layer
    exclude_modules: list[str] = Field(default_factory=list)  # layers without an adapter
    match_all_linear: bool = False  # the explicit form of empty target_modules
    dim: int = Field(default=8, gt=0)  # the rank of B A
    alpha: int = Field(default=32, gt=0)  # numerator of the scale alpha / dim
    lora_A_init: Literal["xavier", "kaiming"] = "xavier"  # normal or uniform values; B is initially 0
    save_merged: bool = True  # checkpoints also hold the merged model in weights/; false: the adapter alone
