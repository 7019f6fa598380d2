"""The share of NeMo-RL's public recipes that load, and that pass a dry run: `nemo_rl_recipes.py CHECKOUT [-v]`.

CHECKOUT is a working tree of NeMo-RL. Counted are the recipes of GRPO, distillation, SFT, DPO, reward models and
evaluation in examples/, each alone, without and with --allow-unsupported; a missing data file is no obstacle, and
environment variables that a recipe reads are set to a directory. A dry run also makes the layout on the recipe's GPUs,
the optimizer and the memory plan, as --dry-run does. "Experts" are recipes of models whose names or layouts say so.
A traceback is an error of ours.
"""

import argparse
import copy
import functools
import logging
import os
import re
import sys
from collections import Counter
from pathlib import Path

from nemo_rl.config import data, loading
from nemo_rl.config.collect import CollectRunConfig
from nemo_rl.data import row_sources
from nemo_rl.errors import ConfigError, flatten_config_errors
from nemo_rl.launch import recipe_commands as commands

LOADERS = {
    "grpo": loading.load_config,
    "distillation": loading.load_distillation_config,
    "sft": loading.load_sft_config,
    "dpo": loading.load_dpo_config,
    "rm": loading.load_reward_model_config,
    "eval": loading.load_eval_config,
}
JOBS = {
    "grpo": commands.GRPO_JOB,
    "distillation": commands.DISTILLATION_JOB,
    "sft": commands.SFT_JOB,
    "dpo": commands.DPO_JOB,
    "rm": commands.REWARD_MODEL_JOB,
    "eval": commands.EVAL_JOB,
}
MODES = ("plain", "--allow-unsupported")
EXPERT_SIZES = ("expert_model_parallel_size", "expert_parallel_size", "expert_tensor_parallel_size")
EXPERTS = re.compile(
    r"moe|\d+b-?a\d+b|30ba3|dsv3|dsv4|deepseek-v[34]|moonlight|mixtral|glm-?4\.5|gpt-?oss|nano-?v3|nano3|super-?v3|nemotron-3",
    re.IGNORECASE,
)
OUT_OF_SCOPE = re.compile(  # experts, images and sound, FP8 and quantisation, other engines
    r"fp8|mxfp8|nvfp4|modelopt|quant|sglang|trtllm|dynamo|megatron_generation|mcore_generation|vlm|avlm|omni|audio|"
    r"clevr|geo3k|mmpr|mmau|refcoco|vision|moe|30ba3b|30b3ab|30ba3|a3b|26ba4b|235b|dsv3|dsv4|deepseek-v3|gptoss|"
    r"glm|nano-?v3|nano3|nemotron-3|nemotron-3-super|super-?v3|ultra|ep\d+|a22b|a17b|35b-a3b|prorlv2_1_moe|qwen3\.5|nixl|dsk",
    re.IGNORECASE,
)


def measure(root: Path, *, verbose: bool) -> int:  # a table of counts, filled in one pass  # noqa: C901
    """Print the shares of the checkout's recipes that load, and the commonest obstacles; return how many crash."""
    os.chdir(root)
    logging.disable(logging.WARNING)
    loaded, crashes = Counter[tuple[str, str]](), 0
    obstacles = {mode: Counter[str]() for mode in MODES}
    paths = sorted(path for path in (root / "examples").rglob("*.yaml") if path.is_file())
    for path in paths:
        family = _find_family(path)
        if family is None:
            continue
        for mode in MODES:
            try:
                found, planned = _problems(path, family, allow_unsupported=mode != "plain")
            except Exception as error:  # what a user would see as a traceback
                crashes += 1
                print(f"CRASH {path}: {type(error).__name__}: {error}")
                continue
            scopes = _find_scopes(path)
            for scope in scopes:
                loaded[mode, f"{scope}: recipes"] += 1
                loaded[mode, f"{scope}: loaded"] += not found
                loaded[mode, f"{scope}: planned"] += not found and not planned
            obstacles[mode].update({f"{error.key}: {error.problem}"[:150] for error in (*found, *planned)})
            if verbose and (found or planned):
                what = "loading" if found else "dry run"
                texts = " | ".join(str(error)[:160] for error in (*found, *planned))
                print(f"{path.relative_to(root)} ({mode}, {what}): {texts}")
    for mode in MODES:
        for scope in ("all", "dense text", "experts"):
            total = loaded[mode, f"{scope}: recipes"]
            for count, verb in (
                (loaded[mode, f"{scope}: loaded"], "load"),
                (loaded[mode, f"{scope}: planned"], "plan"),
            ):
                print(f"{mode:20} {scope:11} {count:4} of {total:4} {verb} ({count / max(total, 1):.1%})")
    print(f"crashes: {crashes}")
    for mode in MODES:
        print(f"obstacles, {mode}:")
        for text, count in obstacles[mode].most_common(40 if verbose else 8):
            print(f"  {count:4} {text}")
    return crashes


def _problems(path: Path, family: str, *, allow_unsupported: bool) -> tuple[list[ConfigError], list[ConfigError]]:
    """Return what stops a recipe from loading, and if nothing does, what stops its dry run."""
    try:
        config = LOADERS[family](path, (), allow_unsupported=allow_unsupported)
    except ConfigError as error:
        return list(flatten_config_errors([error])), []
    try:
        if family in ("grpo", "distillation"):  # planned for the recipe's GPUs, which this machine need not have
            config = LOADERS[family](path, ("++policy.device=cuda",), allow_unsupported=allow_unsupported)
        JOBS[family].plan(config)
    except ConfigError as error:
        return [], list(flatten_config_errors([error]))
    return [], []


@functools.cache
def _find_family(path: Path) -> str | None:
    raw = loading.read_raw(CollectRunConfig, path, ())
    return next((name for name in LOADERS if name in raw), None)


def _find_scopes(path: Path) -> list[str]:
    scopes = {"all": True, "dense text": not _is_out_of_scope(path), "experts": _has_experts(path)}
    return [scope for scope, holds in scopes.items() if holds]


@functools.cache
def _has_experts(path: Path) -> bool:
    policy = loading.read_raw(CollectRunConfig, path, ()).get("policy") or {}
    sections = [policy.get(name) or {} for name in ("megatron_cfg", "dtensor_cfg")]
    return bool(
        EXPERTS.search(f"{path.name} {policy.get('model_name')}")
        or any(section.get(key) not in (None, 1) for section in sections for key in EXPERT_SIZES)
    )


@functools.cache
def _is_out_of_scope(path: Path) -> bool:
    raw = loading.read_raw(CollectRunConfig, path, ())
    policy = raw.get("policy") or {}
    generation = policy.get("generation") or {}
    megatron, dtensor = policy.get("megatron_cfg") or {}, policy.get("dtensor_cfg") or {}
    engine = generation.get("vllm_cfg") or {}
    return bool(
        OUT_OF_SCOPE.search(str(path.name))
        or OUT_OF_SCOPE.search(str(policy.get("model_name")))
        or generation.get("backend", "vllm") != "vllm"
        or engine.get("precision") == "fp8"
        or (megatron.get("enabled") and (megatron.get("fp8_cfg") or {}).get("enabled"))
        or (megatron.get("enabled") and megatron.get("expert_model_parallel_size", 1) not in (1, None))
        or policy.get("is_vlm")
        or policy.get("quant_cfg")
        or (dtensor.get("automodel_kwargs") or {}).get("freeze_config")
    )


def _ignore_missing_files() -> None:
    for module in (data, row_sources):
        vars(module)["check_file"] = lambda key, path: None


def _cache_layers() -> None:
    """Read each file once: recipes share their bases."""
    read = functools.cache(loading.read_layer)
    loading.read_layer = lambda path, included_by=None: copy.deepcopy(read(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("-v", "--verbose", action="store_true", help="every recipe's obstacles")
    parsed = parser.parse_args()
    for name in ("HF_HOME", "PERSISTENT_CACHE"):
        os.environ.setdefault(name, "/tmp")
    _cache_layers()
    _ignore_missing_files()
    sys.exit(measure(parsed.checkout.resolve(), verbose=parsed.verbose) > 0)


if __name__ == "__main__":
    main()
