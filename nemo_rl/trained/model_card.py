"""The model card of an exported model, and the hyperparameters that are published with it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from nemo_rl.launch.model_files import QUICKSTART_MODEL
from nemo_rl.launch.trained_model import METRICS_FILE, TrainedModel

CARD_FILE = "README.md"
RECIPE_FILE = "training_recipe.yaml"
PUBLISHED_SECTIONS = ("grpo", "distillation", "sft", "dpo", "loss_fn", "reward_penalties", "policy")
PRIVATE_KEYS = ("vllm_kwargs", "backend_cfg", "server", "env_vars")  # sections that may hold anything
NUM_CURVE_ROWS = 12
CURVES = {"train/reward": "reward", "validation/reward": "validation reward", "validation/accuracy": "accuracy",
          "validation/greedy_accuracy": "greedy accuracy", "train/loss": "loss",
          "train/mean_gen_tokens_per_sample": "tokens a response"}  # fmt: skip


def format_recipe(trained: TrainedModel) -> str:
    """Return the hyperparameters of the run as YAML: nothing of its data, environments and machine.

    A value that names a place is cut to its last name.
    """
    kept = {name: trained.config[name] for name in PUBLISHED_SECTIONS if name in trained.config}
    return yaml.safe_dump(_without_places(kept), sort_keys=False, allow_unicode=True)


def format_card(trained: TrainedModel, name: str) -> str:
    """Return the card in Markdown, with the metadata that the hub reads at its head."""
    base = _base_model(trained)
    on_hub = "/" in base and not base.startswith(QUICKSTART_MODEL)
    is_adapter = not trained.has_weights
    metadata = {
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["reinforcement-learning", "nemo-rl", _algorithm(trained)],
        **({"base_model": base} if on_hub else {}),
    }
    parts = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---",
        f"# {name}",
        f"{_subject(trained)}`{base}` after {trained.checkpoint.step} steps of {_algorithm(trained)} with nemo-rl. "
        f"Hyperparameters: [{RECIPE_FILE}]({RECIPE_FILE}).",
        f"## Use\n\n{_use_adapter(name, base) if is_adapter else _use_model(name)} Prompt and response together had at "
        f"most {trained.policy.get('max_total_sequence_length')} tokens in training.",
        _format_table("Evaluation", ("metric", "value"), _evaluation(trained)),
        _format_table("Training", *_curves(trained)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _subject(trained: TrainedModel) -> str:
    """Return the beginning of the sentence about an adapter; nothing for whole weights."""
    of_policy = f" of the policy `{trained.policy_name}`" if trained.policy_name else ""
    return "" if trained.has_weights else f"LoRA adapter{of_policy} on "


def _use_model(name: str) -> str:
    return (
        "```python\nfrom transformers import pipeline\n\n"
        f'answer = pipeline("text-generation", "{name}")\n'
        'print(answer([{"role": "user", "content": "..."}])[0]["generated_text"][-1]["content"])\n```\n\n'
        f"Or `vllm serve {name}`."
    )


def _use_adapter(name: str, base: str) -> str:
    return (
        "```python\nfrom peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
        f'model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{name}")\n```\n\n'
        f"Or `vllm serve {base} --enable-lora --lora-modules {name}={name}`."
    )


def _algorithm(trained: TrainedModel) -> str:
    return next((key for key in ("grpo", "distillation", "sft", "dpo") if key in trained.config), "training")


def _base_model(trained: TrainedModel) -> str:
    """Return the model that was trained; of a directory its name."""
    name = str(trained.policy.get("model_name"))
    return Path(name).name if _is_place(name) else name


def _evaluation(trained: TrainedModel) -> list[tuple[str, str]]:
    measured = trained.checkpoint.info.metrics
    return [(name.removeprefix("val:"), f"{value:.4g}") for name, value in measured.items() if name.startswith("val:")]


def _curves(trained: TrainedModel) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return header and rows of the curves up to the checkpoint's step, at most NUM_CURVE_ROWS steps."""
    steps = _read_metrics(trained)
    shown = {name: title for name, title in CURVES.items() if any(name in values for values in steps.values())}
    validated = [step for step, values in steps.items() if any(name.startswith("validation/") for name in values)]
    numbers = sorted(validated if len(validated) > 1 else steps)
    last = len(numbers) - 1
    kept = sorted({numbers[round(i * last / (NUM_CURVE_ROWS - 1))] for i in range(NUM_CURVE_ROWS) if numbers})
    rows = [(str(step), *(_cell(steps[step], name) for name in shown)) for step in kept]
    return ("step", *shown.values()), rows


def _cell(values: Mapping[str, float], name: str) -> str:
    return f"{values[name]:.4g}" if name in values else ""


def _read_metrics(trained: TrainedModel) -> dict[int, dict[str, float]]:
    """Return the numbers by step: of a step that was repeated after a resume the last; broken lines are skipped."""
    steps: dict[int, dict[str, float]] = {}
    if trained.run_dir is None:
        return steps
    for line in (trained.run_dir / METRICS_FILE).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # cut off by a kill
            continue
        step = row.get("step") if isinstance(row, dict) else None
        if isinstance(step, int) and step <= trained.checkpoint.step:
            numbers = {key: value for key, value in row.items() if isinstance(value, int | float)}
            steps.setdefault(step, {}).update(numbers)
    return steps


def _format_table(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ("---",) * len(header), *rows)]
    return f"## {title}\n\n" + "\n".join(lines)


def _without_places(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_places(each) for key, each in value.items() if key not in PRIVATE_KEYS}
    if isinstance(value, list):
        return [_without_places(each) for each in value]
    if isinstance(value, str) and _is_place(value):
        return Path(value).name
    return value


def _is_place(text: str) -> bool:
    """Return whether a text is a path or an address; a name on the hub has one slash, and a template has lines."""
    if "\n" in text or text.startswith(QUICKSTART_MODEL):
        return False
    return (
        text.startswith(("/", "~", "."))
        or text.count("/") > 1
        or "://" in text
        or ("/" in text and Path(text).exists())
    )
