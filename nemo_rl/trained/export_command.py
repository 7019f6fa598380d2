"""`nemo-rl export`: the model of a run as a Hugging Face directory with a model card, to use, keep or publish.

Of a checkpoint that has an adapter alone it is a directory in peft's format.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from nemo_rl.command_line import Command, ExitCode, path_argument
from nemo_rl.durable_files import complete_or_absent
from nemo_rl.errors import ConfigError
from nemo_rl.launch.trained_model import (
    TOKENIZER,
    TrainedModel,
    add_model_arguments,
    add_policy_argument,
    chosen_policy,
)
from nemo_rl.observability.console import check_writable, configure_logging
from nemo_rl.trained.model_card import CARD_FILE, RECIPE_FILE, format_card, format_recipe

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CONFIG_JSON = "config.json"


def export(trained: TrainedModel, directory: Path, *, dtype: str | None = None) -> Path:
    """Write the weights, or the adapter if the checkpoint has no others, with tokenizer, recipe and model card to a new
    directory, which is complete or absent; return it.

    `dtype` (None: the run's `policy.precision`) is that of the floating-point tensors; checkpoints hold float32.

    Raises:
        ConfigError: the directory exists.
        OSError: it cannot be written.
    """
    if directory.exists():
        raise ConfigError("--to", str(directory), "exists already; expected a directory that can be created")
    wanted = dtype or str(trained.policy.get("precision", "float32"))
    with complete_or_absent(directory) as draft:
        for file in _model_files(trained):
            if file.suffix == ".safetensors":
                _convert_file(file, draft / file.name, DTYPES[wanted])
            else:
                shutil.copy(file, draft / file.name)
        if trained.has_weights:
            _describe_tensors(draft, wanted)
        (draft / RECIPE_FILE).write_text(format_recipe(trained), encoding="utf-8")
        (draft / CARD_FILE).write_text(format_card(trained, directory.name), encoding="utf-8")
    return directory


def _model_files(trained: TrainedModel) -> list[Path]:
    """Return the files of weights and tokenizer; raises CheckpointError if there are none."""
    adapter = None if trained.has_weights else trained.adapter
    directories = [trained.weights] if adapter is None else [adapter, trained.checkpoint.path / TOKENIZER]
    found = (file for directory in directories for file in directory.glob("*"))
    return sorted(file for file in found if file.is_file() and not file.is_symlink())


def _convert_file(source: Path, target: Path, dtype: torch.dtype) -> None:
    tensors = load_file(source)
    converted = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    save_file(converted, target, metadata={"format": "pt"})
    readable = next(source.parent.glob(f"*{CONFIG_JSON}"))  # safetensors writes files that only their owner can read
    shutil.copymode(readable, target)


def _describe_tensors(directory: Path, dtype: str) -> None:
    """Name the tensors' dtype in config.json, and in the index of several files their size."""
    config = directory / CONFIG_JSON
    values = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps({**values, "dtype": dtype}, indent=2) + "\n", encoding="utf-8")
    index = directory / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        values = json.loads(index.read_text(encoding="utf-8"))
        size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        index.write_text(json.dumps({**values, "metadata": {"total_size": size}}, indent=2) + "\n", encoding="utf-8")


def push(directory: Path, name: str, *, is_private: bool) -> str:
    """Upload an exported directory to the hub as `organisation/name`; return its address.

    Raises ConfigError for a public repository of that name if it is to be private.
    """
    from huggingface_hub import HfApi  # here: only this needs the network

    api = HfApi()
    repository = api.create_repo(name, private=is_private, exist_ok=True)
    if is_private and not api.repo_info(repository.repo_id).private:
        raise ConfigError("--push", name, "exists and is public: expected another name, or --public")
    api.upload_folder(repo_id=repository.repo_id, folder_path=directory)
    return str(repository)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_policy_argument(parser)
    parser.add_argument("--to", type=path_argument, required=True, metavar="DIR", help="the new directory")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="of the weights; default: the run's policy.precision")
    parser.add_argument("--push", metavar="NAME", help="also upload it to the hub as organisation/name, private")
    parser.add_argument("--public", action="store_true", help="with --push: for everybody to see")


def _export(parsed: argparse.Namespace) -> ExitCode:
    configure_logging()
    if parsed.public and not parsed.push:
        raise ConfigError("--public", True, "belongs to --push NAME")
    if parsed.push:
        _check_push(parsed.push)
    check_writable("--to", str(parsed.to.absolute().parent))
    trained = chosen_policy(parsed)
    directory = export(trained, parsed.to, dtype=parsed.dtype)
    sys.stdout.write(f"Model       {directory}\nOf          {trained.checkpoint.path}\n")
    if parsed.push:
        sys.stdout.write(f"Published   {push(directory, parsed.push, is_private=not parsed.public)}\n")
    return ExitCode.DONE


def _check_push(name: str) -> None:
    """Raise ConfigError for a name that the hub does not take, and without a token: before anything is written."""
    from huggingface_hub import get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError("--push", name, f"expected organisation/name: {error}") from error
    if get_token() is None:
        raise ConfigError("--push", name, "needs a token of the hub: hf auth login, or HF_TOKEN in the environment")


EXPORT = Command(
    """Write the model of a run as a Hugging Face directory: weights, tokenizer, chat template, recipe and a model card.

If the run has saved an adapter alone, it is that, in peft's format.
""",
    _add_arguments,
    _export,
    program="nemo-rl export",
    reported_errors=(OSError,),
)
