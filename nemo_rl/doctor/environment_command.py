"""`nemo-rl env test`: an environment or reward function played on some rows, without training."""

import argparse
import asyncio
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from nemo_rl.command_line import Command, ExitCode
from nemo_rl.config.config_command import verb_of
from nemo_rl.errors import ConfigError, escape
from nemo_rl.recipes import find_recipe

TESTED = "tested"  # the entry of `env` that a dotted path becomes
LOCAL_RECIPE = "grpo.yaml"  # the recipe that `nemo-rl init` writes
MAX_CHARACTERS = 400  # shown of a message
TURNS = 8  # for an environment given by its path
TINY = "tiny"
TINY_TOKENS = 512  # per rollout of the quickstart's model
MAX_TOKENS = 4096  # per rollout of a model that is not a recipe's


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["test"])
    parser.add_argument("target", help="a dotted path (my.module:Env), or an entry of the recipe's env")
    parser.add_argument("--config", metavar="RECIPE", help=f"whose rows and env are used; default: {LOCAL_RECIPE} here")
    parser.add_argument("--data", metavar="FILE", help="rows in place of the recipe's: JSON Lines, Parquet, ...")
    parser.add_argument("--rows", type=int, default=20, metavar="N", help="rows to play; default: 20")
    parser.add_argument("--turns", type=int, default=None, metavar="N", help=f"of a conversation at most: {TURNS}")
    parser.add_argument(
        "--model",
        default="scripted",
        help="scripted: each row's answer, then wrong ones (default); tiny: the quickstart's model; "
        "http://...: an OpenAI-compatible server",
    )
    parser.add_argument("--quiet", action="store_true", help="print the failed conversations and the summary alone")
    parser.add_argument("overrides", nargs="*", help="key=value, ++key=value, ~key (Hydra's grammar)")


def _run(parsed: argparse.Namespace) -> ExitCode:
    from nemo_rl.doctor.trial import find_prompts, with_own_environment

    for key in ("rows", "turns"):
        if (value := getattr(parsed, key)) is not None and value < 1:
            raise ConfigError(f"--{key}", value, "allowed: at least 1")
    name, config = _load(parsed)
    if name in config.runner_sections:
        raise ConfigError("TARGET", name, "is an agent, which needs a model: nemo-rl collect plays it")
    config = with_own_environment(config, name)
    prompts = find_prompts(config, parsed.rows, frozenset({name}))
    if not prompts:
        raise ConfigError("TARGET", name, "no row of the data has this environment")
    rollouts = asyncio.run(_play(config, prompts, parsed.model))
    for rollout in rollouts:
        if rollout.failure is not None or not parsed.quiet:
            sys.stdout.writelines(f"{line}\n" for line in _format_rollout(rollout))
    sys.stdout.writelines(f"{line}\n" for line in _format_summary(rollouts, is_scripted=parsed.model == "scripted"))
    return ExitCode.FAILED if any(rollout.failure for rollout in rollouts) else ExitCode.DONE


def _load(parsed: argparse.Namespace) -> tuple[str, Any]:
    """Return the name of the tested environment, and the configuration that has it."""
    from nemo_rl.config import loading

    recipe = parsed.config or (LOCAL_RECIPE if Path(LOCAL_RECIPE).is_file() and parsed.data is None else None)
    config: Any = None
    if recipe is not None:
        path = find_recipe(recipe)
        config = loading.LOADERS[verb_of(path)](path, parsed.overrides)
        if not hasattr(config, "env"):
            raise ConfigError("--config", recipe, "has no env; expected a recipe of grpo, distill, collect or eval")
        if parsed.target in config.env and parsed.data is None:
            return parsed.target, config
    elif parsed.data is None:
        raise ConfigError("--data", None, f"required without --config and without {LOCAL_RECIPE} in this directory")
    if ":" not in parsed.target and "." not in parsed.target and (config is None or parsed.target not in config.env):
        known = () if config is None else config.env
        raise ConfigError("TARGET", parsed.target, "is no dotted path and no entry of env", known=known)
    values = _trial_recipe(parsed, config)
    with TemporaryDirectory() as directory:
        file = Path(directory) / "trial.yaml"
        file.write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")
        return TESTED, loading.load_collect_config(file, () if recipe else parsed.overrides)


def _trial_recipe(parsed: argparse.Namespace, config: Any) -> dict[str, Any]:
    """Return a recipe of a collection with the tested environment over the rows that the command line names."""
    if parsed.data is not None:
        data: dict[str, Any] = {"input": {"data_path": parsed.data, "env_name": TESTED}}
    else:
        sections = config.data.datasets_of("input" if "input" in type(config.data).model_fields else "train")
        rows = [{**own.model_dump(exclude_none=True), "env_name": TESTED} for _, own in sections]
        data = {"input": rows, "default": config.data.default.model_dump(exclude_none=True, exclude={"env_name"})}
    own = config.env.get(parsed.target) if config is not None else None
    section = {"type": parsed.target} if own is None else own.model_dump()
    turns = parsed.turns or (TURNS if config is None else max(config.max_rollout_turns, 1))
    return {
        "defaults": "collect",
        "data": {"_override_": True, **data},
        "env": {"_override_": True, TESTED: section},
        "policy": {"max_total_sequence_length": MAX_TOKENS, "generation": {"max_new_tokens": MAX_TOKENS // 2}},
        "collect": {"max_rollout_turns": turns},
    }


async def _play(config: Any, prompts: Sequence[Any], model: str) -> Sequence[Any]:
    from nemo_rl.doctor.trial import WRONG_ANSWERS, play

    if model == "scripted":
        return await play(config, prompts, generations=len(WRONG_ANSWERS) + 1)
    async with AsyncExitStack() as stack:
        if model == TINY:
            generation, encoder = await _open_tiny(stack)
            return await play(_of_length(config), prompts, generations=2, generation=generation, encoder=encoder)
        if not model.startswith(("http://", "https://")):
            raise ConfigError("--model", model, f"allowed: scripted, {TINY}, or the address of a server: http://...")
        return await play(config, prompts, generations=2, generation=await _connect(model, stack))


def _of_length(config: Any) -> Any:
    """Return the configuration with the quickstart's short responses."""
    generation = config.policy.generation.model_copy(update={"max_new_tokens": 32})
    policy = config.policy.model_copy(update={"generation": generation, "max_total_sequence_length": TINY_TOKENS})
    return config.model_copy(update={"policy": policy})


async def _open_tiny(stack: AsyncExitStack) -> tuple[Any, Any]:
    """Start the quickstart's model in this process, which is made at its first use."""
    from nemo_rl.config.loading import load_collect_config
    from nemo_rl.data.chat import ChatEncoder
    from nemo_rl.data.tokenizer import load_tokenizer
    from nemo_rl.generation.engines import EngineModel, make_generation
    from nemo_rl.launch.models import resolve_model

    config = load_collect_config(
        find_recipe("collect"), ["++server.backend=hf", f"policy.max_total_sequence_length={TINY_TOKENS}"]
    )
    path = await resolve_model(config.policy.model_name)
    model = EngineModel(path, config.policy.precision, TINY_TOKENS, "cpu", False)
    generation = await make_generation(config.engine, model, start_timeout_s=600.0)
    stack.push_async_callback(generation.close)
    return generation, ChatEncoder(load_tokenizer(config.policy.tokenizer, path))


async def _connect(address: str, stack: AsyncExitStack) -> Any:
    from nemo_rl.config.loading import load_collect_config
    from nemo_rl.launch.sampled import connect

    overrides = [f"++server.address={address}", "++server.api=chat"]
    server = await connect(load_collect_config(find_recipe("collect"), overrides), None)
    stack.push_async_callback(server.generation.close)
    return server.generation


def _format_rollout(rollout: Any) -> Iterator[str]:
    """Yield a header line with the outcome, then a line for each message."""
    where = f"row {rollout.group_id}, answer {rollout.generation_index + 1}"
    seconds = f"{rollout.timings.environment_s + rollout.timings.scoring_s:.3g} s in environment and scorers"
    if rollout.failure is not None:
        cause, origin = rollout.failure.cause, rollout.failure.origin
        yield f"--- {where}: FAILED: {escape(cause)}{f' ({origin})' if origin else ''}, {seconds}"
    else:
        named = ", ".join(f"{name} {value:.3g}" for name, value in rollout.rewards.items()) or "none"
        yield f"--- {where}: reward {rollout.reward:.3g} ({named}), {rollout.num_turns} turns, {seconds}"
    for entry in rollout.message_log:
        yield f"    {entry.message.role}: {escape(entry.message.content, MAX_CHARACTERS)}"


def _format_summary(rollouts: Sequence[Any], *, is_scripted: bool) -> Iterator[str]:
    from nemo_rl.doctor.trial import split_answers

    failed = [rollout for rollout in rollouts if rollout.failure is not None]
    seconds = [rollout.timings.environment_s + rollout.timings.scoring_s for rollout in rollouts]
    yield f"Rollouts  {len(rollouts)}, of which {len(failed)} failed"
    yield f"Seconds   {statistics.fmean(seconds):.3g} each in environment and scorers, {max(seconds):.3g} at most"
    rewards = [rollout.reward for rollout in rollouts if rollout.failure is None]
    if rewards:
        yield f"Reward    {statistics.fmean(rewards):.3g} on average, from {min(rewards):.3g} to {max(rewards):.3g}"
    right, wrong = split_answers(rollouts) if is_scripted else ([], [])
    if right and wrong:
        yield f"Answers   right ones earn {statistics.fmean(right):.3g}, wrong ones {statistics.fmean(wrong):.3g}"
        if statistics.fmean(right) <= statistics.fmean(wrong):
            yield "warning: the reference answers earn no more than wrong ones; does the row have the field `answer`?"


ENV = Command(
    "Play an environment or a reward function on some rows, and show conversations, rewards, times and failures.\n"
    "nemo-rl env test rewards:spelling --data rows.jsonl --rows 20\n"
    "nemo-rl env test spelling --config grpo.yaml --model http://127.0.0.1:8000",
    _add_arguments,
    _run,
    program="nemo-rl env",
)
