"""Options and rows that exclude each other with models that see, or with those that do not."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import Idefics3Config, LlamaConfig

from nemo_rl.config.loading import load_config
from nemo_rl.config.policy import PolicyConfig
from nemo_rl.data.chat import ChatEncoder
from nemo_rl.errors import ConfigError
from nemo_rl.launch.resolved_model import (
    ResolvedModel,
    check_images_are_seen,
    check_vision,
    resolve_policy,
    resolve_teachers,
)
from tests.fakes.vision import TEMPLATE, TILE_TOKENS, make_tokenizer, save_vision_model

VISION = Path(__file__).parents[3] / "examples" / "configs" / "vision.yaml"
OPD = ("grpo.adv_estimator.name=opd",)
ASYNC = ("grpo.async_grpo.enabled=true", "loss_fn.use_importance_sampling_correction=true")


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"sequence_packing": {"enabled": True, "share_prefixes": True}}, "policy.sequence_packing.share_prefixes"),
        ({"dtensor_cfg": {"context_parallel_size": 2}}, "policy.dtensor_cfg.context_parallel_size"),
        ({"megatron_cfg": {"enabled": True}}, "policy.model_name"),
    ],
)
def test_what_models_that_see_exclude_is_refused(section: dict[str, Any], key: str) -> None:
    policy = PolicyConfig.model_validate({"model_name": "m", **section})
    with pytest.raises(ConfigError) as refused:
        check_vision(policy, Idefics3Config())
    assert refused.value.key == key
    check_vision(policy, LlamaConfig())
    check_vision(PolicyConfig(model_name="m", freeze_vision=True), Idefics3Config())
    adapted = {"dtensor_cfg": {"lora_cfg": {"enabled": True}}}
    check_vision(PolicyConfig.model_validate({"model_name": "m", **adapted}), Idefics3Config())


def test_a_model_that_reads_text_has_no_tower_to_freeze() -> None:
    with pytest.raises(ConfigError, match=r"policy\.freeze_vision = True: models of type 'llama'"):
        check_vision(PolicyConfig(model_name="m", freeze_vision=True), LlamaConfig())


def test_an_environment_that_shows_images_needs_a_policy_that_sees() -> None:
    config = load_config(VISION, ["++env.m={type: mcp, command: [a], images: true}", "gateway.tool_parser=hermes"])
    reads_text = ChatEncoder(make_tokenizer([], TEMPLATE))
    with pytest.raises(ConfigError, match=r"env\.m\.images = True: policy\.model_name reads text; allowed: false"):
        check_images_are_seen(config, reads_text)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("text", r"teacher\.model_name = .*: it reads text, and data\.train\.images shows images; allowed"),
        ("tiles", "its processor has do_image_splitting = True, and the policy's False; allowed"),
        ("idefics3", None),
    ],
)
def test_a_teacher_is_given_the_features_that_the_policy_sees(kind: str, said: str | None, tmp_path: Path) -> None:
    save_vision_model("idefics3", tmp_path / "policy")
    if kind == "text":
        make_tokenizer(TILE_TOKENS, TEMPLATE).save_pretrained(tmp_path / "teacher")
        LlamaConfig().save_pretrained(tmp_path / "teacher")
    else:
        save_vision_model(kind, tmp_path / "teacher")
    paths = [f"policy.model_name={tmp_path / 'policy'}", f"++teacher.model_name={tmp_path / 'teacher'}"]
    config = load_config(VISION, [*OPD, *paths, "++data.train.images={}"])

    async def resolve() -> dict[str, ResolvedModel]:
        return await resolve_teachers(config, await resolve_policy(config.policy))

    if said is None:
        assert asyncio.run(resolve())["teacher"].encoder.images is not None
        return
    with pytest.raises(ConfigError, match=said):
        asyncio.run(resolve())


def test_images_may_be_sampled_beside_training() -> None:
    for overrides in (ASYNC, ("grpo.val_overlap=true",)):
        load_config(VISION, ["++data.train.images={}", *overrides])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            (*OPD, "++teacher={model_name: m, server: {base_urls: ['http://localhost:1'], model: m}}"),
            "served teachers read text",
        ),
        (("++data.train.images.directories=[/nowhere]",), "no such directory"),
    ],
)
def test_runs_that_cannot_show_images_are_refused(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(VISION, ["++data.train.images={}", *overrides])
