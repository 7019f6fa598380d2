"""`nemo-rl convert`: NeMo-RL's checkpoints as Hugging Face directories."""

import argparse
import sys

from nemo_rl.command_line import Command, ExitCode, path_argument
from nemo_rl.observability.console import configure_logging

DESCRIPTION = """Write the weights and the tokenizer of a checkpoint of NeMo-RL as a Hugging Face directory.

It reads DTensor policies (torch.distributed.checkpoint and safetensors shards, with experts, too; LoRA adapters, which
it merges into the base model) and Megatron's torch_dist (Llama, Qwen2, Qwen3, Qwen3-MoE, Mixtral, GLM-4.5), in this
process and without a GPU.
The optimizer's state is not converted.
"""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=path_argument, help="step_N, or policy/weights in it")
    parser.add_argument("-o", "--output", type=path_argument, required=True, help="the directory to write; a new one")
    parser.add_argument("--model", help="the model that was trained; default: as the checkpoint names it")


def _run(parsed: argparse.Namespace) -> ExitCode:
    from nemo_rl.compat.checkpoints import convert  # loads torch

    configure_logging()
    num_weights = convert(parsed.checkpoint, parsed.output, model_name=parsed.model)
    sys.stdout.write(f"{parsed.output}: {num_weights} weights; train on with policy.model_name={parsed.output}\n")
    return ExitCode.DONE


CONVERT = Command(DESCRIPTION, _add_arguments, _run, program="nemo-rl convert", reported_errors=(OSError,))
