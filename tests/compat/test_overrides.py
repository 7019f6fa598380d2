"""Overrides give the configuration that Hydra gives, applied as NeMo-RL applies them."""

import copy
import math
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from nemo_rl.config.overrides import apply_override, parse_override
from nemo_rl.errors import ConfigError

RECIPE: dict[str, Any] = {
    "grpo": {"num_prompts_per_step": 4, "seed": 42, "async_grpo": {"enabled": False}},
    "policy": {
        "model_name": "m",
        "optimizer": {"kwargs": {"lr": 1e-6, "betas": [0.9, 0.999]}},
        "hf_config_overrides": {"a": 1, "b": {"c": 2}},
        "generation": {"stop_strings": None, "vllm_kwargs": {"x": 1}},
    },
    "data": {"train": [{"dataset_name": "gsm8k", "size": 3}, {"dataset_name": "squad"}], "shuffle": True},
    "logger": {"wandb": {"name": "n", "tags": ["a"]}},
}
KWARGS = "policy.hf_config_overrides"
LISTS = [
    *[[f"grpo.seed={value}"] for value in ("1", "0", "-3", "null", "1e3", "0.5", "'7'")],
    *[[f"grpo.async_grpo.enabled={value}"] for value in ("true", "false", "True", "'true'")],
    *[[f"policy.model_name={value}"] for value in ("org/name", "'a b'", '"x=y"', "a.b", "runs/step_3", "1.5B")],
    *[[f"policy.optimizer.kwargs.lr={value}"] for value in ("5e-6", "1.0e-5", "3", ".5", "inf")],
    *[[f"policy.optimizer.kwargs.betas={value}"] for value in ("[0.9,0.95]", "[]", "[1]", "[a,b]", "[[1],[2]]")],
    *[[f"{sign}{KWARGS}.new={value}"] for sign in ("+", "++") for value in ("1", "text", "[1,2]", "{x: 1}", "null")],
    *[[f"++{KWARGS}.a={value}"] for value in ("2", "{y: {z: 1}}", "[3]")],
    *[[f"{KWARGS}={value}"] for value in ("{a: 5}", "{b: {d: 3}}", "{n: {m: [1]}}")],
    *[[f"+{KWARGS}.deep.er={value}"] for value in ("1", "{k: v}")],
    *[[f"~{key}"] for key in ("grpo.seed", f"{KWARGS}.b", f"{KWARGS}.b.c", "logger.wandb", "grpo")],
    *[[f"~{key}"] for key in ("grpo.seed=42", f"{KWARGS}.a=1")],
    *[[f"data.train.{item}"] for item in ("0.size=9", "1.dataset_name=aime", "0.dataset_name='x y'")],
    *[[f"++data.train.{item}"] for item in ("1.size=2", "0.split=test")],
    ["data.train=[{dataset_name: a}]"],
    ["data.train=[]"],
    ["policy.model_name='${grpo.seed}'"],
    ["policy.model_name=${logger.wandb.name}", "logger.wandb.name=z"],
    ["grpo.seed=${grpo.num_prompts_per_step}", "grpo.num_prompts_per_step=8"],
    ["grpo.seed=1", "grpo.seed=2"],
    ["~grpo.seed", "+grpo.seed=3"],
    ["logger.wandb.tags=[b,c]", "logger.wandb.name=null"],
    ["++policy.generation.vllm_kwargs.y=2", "~policy.generation.vllm_kwargs.x"],
    ["policy.generation.stop_strings=['a b','\\n']"],
    [f"++{KWARGS}.b.c=7", f"{KWARGS}.b.c=8", "data.shuffle=false"],
]


def by_hydra(overrides: list[str]) -> Any:
    config = OmegaConf.create(copy.deepcopy(RECIPE))
    parsed = OverridesParser.create().parse_overrides(overrides)
    ConfigLoaderImpl._apply_overrides_to_config(parsed, config)
    return OmegaConf.to_container(config, resolve=True)


def test_there_are_sixty_lists() -> None:
    assert len(LISTS) >= 60


@pytest.mark.parametrize("overrides", LISTS, ids=" ".join)
def test_a_list_gives_what_hydra_gives(overrides: list[str]) -> None:
    config = copy.deepcopy(RECIPE)
    for text in overrides:
        apply_override(config, text)
    assert OmegaConf.to_container(OmegaConf.create(config), resolve=True) == by_hydra(overrides)


PARTS = (
    "a",
    "B_2",
    "0",
    "12",
    "007",
    "1_0",
    "1e3",
    "1E-3",
    "-1",
    "+2",
    "1.5",
    ".5",
    "5.",
    "1.5e-6",
    "1.5B",
    "true",
    "True",
)
PARTS += (
    "null",
    "nan",
    "-inf",
    "org/name",
    "/tmp/x",
    "a.b",
    "a-b",
    "..",
    "x.1",
    "v1.5/2",
    "nan.a",
    "true.b",
    "-",
    "_",
    "x/",
)


def read(parse: Callable[[], Any]) -> str:
    """Return what a parser reads, or that it refuses."""
    try:
        return f"{type(value := parse()).__name__} {value!r}"
    except (HydraException, ConfigError):
        return "refused"


def is_beyond_float(value: str) -> bool:
    try:
        exact = Decimal(value)
    except InvalidOperation:
        return False
    return exact.is_finite() and exact != 0 and float(exact) in (0.0, math.inf, -math.inf)


def test_plain_values_are_read_as_hydra_reads_them() -> None:
    """Numbers beyond a float, 1e312 and 1e-3007, are refused: Hydra reads infinity and zero without a word."""
    parser = OverridesParser.create()
    for value in (*PARTS, *(f"{a}{b}" for a in PARTS for b in PARTS)):
        text = f"++k.x={value}"
        found, expected = read(lambda: parse_override(text).value), read(lambda: parser.parse_override(text).value())  # noqa: B023
        assert found == ("refused" if is_beyond_float(value) else expected), text


SIGNS = ("", "+", "++", "~", "+++")
KEYS = ("a", "a.b", "a.0.b", "a_1.b2", "a.1b", "a.00", "a.-b", "a-b", "1a", "a/b", "a.b@c", "a..b", "_a")


def test_plain_keys_are_read_as_hydra_reads_them() -> None:
    for override in (f"{sign}{key}=1" for sign in SIGNS for key in KEYS):
        try:
            expected = OverridesParser.create().parse_override(override)
        except HydraException:
            expected = None
        if expected is None or expected.package is not None:
            with pytest.raises(ConfigError):
                parse_override(override)
        else:
            assert parse_override(override).key == expected.key_or_group, override
