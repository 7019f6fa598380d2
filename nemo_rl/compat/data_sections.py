"""NeMo-RL's `data` sections in this project's terms: flat ones, names of datasets, preference sets, several loaders."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_rl.compat.tables import Cause, Report, load_table, reach
from nemo_rl.config.recipe_files import Family, at
from nemo_rl.recipes import find_prompt

DATASET_FIELDS = ("train", "validation", "input")
MMLU_FILES = "https://openaipublic.blob.core.windows.net/simple-evals/mmlu_{language}.csv"
RESPONSE_DATASETS = ("ResponseDataset", "openai_format", "PreferenceDataset", "BinaryPreferenceDataset")
TAKES_TURNS = "example_custom_dataloader"  # NeMo-RL's own: as many prompts of each dataset, one after the other
FOREVER = 1_000_000  # epochs, for datasets that only grpo.max_num_steps ends
OWN_LOADER = Cause(
    "results",
    "no code chooses the prompts of a step: data.train_mix names how many each dataset of data.train gives in turn, "
    "data.train.<n>.repeat weighs datasets that are one set",
)
UNREAD_LOADER = Cause("speed", "read with data.use_multiple_dataloader: true alone")
# NeMo-RL's names: "val:validation-<set>_<metric>", up to 0.3 without "val:"; the set "default" is the only one.
PREFERENCE_METRIC = re.compile(r"(?:val:)?validation-(?P<name>.+)")
PREFERENCE_METRICS = (
    "rewards_chosen_mean", "rewards_rejected_mean", "preference_loss", "sft_loss", "accuracy", "loss",
)  # fmt: skip


def spread_flat_data(config: dict[str, Any]) -> None:
    """Write the flat `data` section, up to release 0.5, as `data.train`, `data.validation` and `data.default`.

    A validation file is read like the training file: its dataset, subset and fields are those of the flat section.
    """
    data = config.get("data")
    if not isinstance(data, dict) or "input" in data:
        return
    table = load_table("releases")
    if "dataset_name" not in data or "train" in data:
        for key in [key for key in table["flat_data"]["default"] if key in data and "train" in data]:
            if (value := data.pop(key)) is not None:
                reach(data, ["default"]).setdefault(key, value)
        return
    moved = {field: {key: data.pop(key) for key in keys if key in data} for field, keys in table["flat_data"].items()}
    train = {key: value for key, value in moved["train"].items() if value is not None}
    data["train"] = train
    data["default"] = {**moved["default"], **(data.get("default") or {})}
    held_out = table["flat_validation"].get(train["dataset_name"])
    if any(data.get(key) is not None for key in table["flat_validation_paths"]):
        own = {key: train[key] for key in table["flat_shared"] if key in train}
        data["validation"] = own | (data.get("validation") or {})
    elif isinstance(held_out, Mapping):
        data.setdefault("validation", dict(held_out))
    elif held_out is not None and data.get("validation") is None:
        train.setdefault("split_validation_size", held_out)


def translate_loaders(config: dict[str, Any], report: Report) -> None:
    """Write a data loader per dataset as `data.train_mix`; a loader of a user's own is refused."""
    data, grpo = config.get("data"), config.get("grpo")
    if not isinstance(data, dict):
        return
    loader, count = data.get("custom_dataloader"), data.get("num_prompts_per_dataloader")
    if not data.get("use_multiple_dataloader"):
        if loader is not None:
            report.skip("data.custom_dataloader", loader, UNREAD_LOADER)
        for key in ("use_multiple_dataloader", "custom_dataloader", "num_prompts_per_dataloader"):
            data.pop(key, None)
        return
    sections = data.get("train")
    if not isinstance(sections, list) or str(loader).rpartition(".")[2] != TAKES_TURNS or not isinstance(count, int):
        report.refuse("data.custom_dataloader", loader, OWN_LOADER)
    else:
        data["train_mix"] = [count] * len(sections)
        if isinstance(grpo, dict):
            grpo["max_num_epochs"] = FOREVER  # NeMo-RL ends such a run by its steps
    for key in ("use_multiple_dataloader", "custom_dataloader", "num_prompts_per_dataloader"):
        data.pop(key, None)


def find_prompts(config: dict[str, Any], report: Report) -> None:
    """Name the packaged prompt instead of NeMo-RL's file "examples/prompts/<name>" if that is not there."""
    data = config.get("data")
    for one in dataset_sections(data) if isinstance(data, dict) else ():
        for name in ("prompt_file", "system_prompt_file"):
            if isinstance(one.get(name), str):
                one[name] = name_prompt(one[name])


def name_prompt(name: str) -> str:
    """Return the packaged prompt's name for a file "examples/prompts/<name>" that is missing; any other as it is."""
    path, packaged = Path(name), f"prompts/{Path(name).name}"
    is_default = path.parts == ("examples", "prompts", path.name) and not path.is_file()
    return packaged if is_default and find_prompt(packaged).is_file() else name


def bound_prompts(config: dict[str, Any], report: Report) -> None:
    """Bound prompts by the policy's length, as NeMo-RL does if `data` allows longer ones."""
    data, total = config.get("data"), at(config, ["policy", "max_total_sequence_length"])
    if report.release is None or not isinstance(data, dict) or not isinstance(total, int):
        return
    if isinstance(data.get("max_input_seq_length"), int):
        data["max_input_seq_length"] = min(data["max_input_seq_length"], total)


def name_datasets(config: dict[str, Any], family: Family) -> None:
    """Rewrite NeMo-RL's names of datasets, in place; a ResponseDataset is jsonl or huggingface, by its data_path."""
    data = config.get("data")
    if not isinstance(data, dict):
        return
    default = data.get("default") if isinstance(data.get("default"), dict) else {}
    assert isinstance(default, dict)
    names = load_table("releases")["datasets"]
    for one in dataset_sections(data):
        if "max_samples" in one:
            one["size"] = one.pop("max_samples")
        name = str(one.get("dataset_name"))
        if name.startswith("mmlu_") and name not in ("mmlu_pro", "mmlu_csv"):
            one |= {"dataset_name": "mmlu_csv", "data_path": MMLU_FILES.format(language=name.removeprefix("mmlu_"))}
        elif name.endswith(".csv"):
            one |= {"dataset_name": "csv", "data_path": name}
        name = one.get("dataset_name")
        if (known := names.get(name) if isinstance(name, str) else None) is not None:
            one.update({**known, **one, "dataset_name": known["dataset_name"]})
    for one in dataset_sections(data, DATASET_FIELDS):
        if (one.get("dataset_name") or default.get("dataset_name")) in RESPONSE_DATASETS:
            path = str(one.get("data_path") or default.get("data_path"))
            one["dataset_name"] = "jsonl" if path.endswith((".jsonl", ".json")) else "huggingface"
    if default.get("dataset_name") in RESPONSE_DATASETS:
        del default["dataset_name"]


def translate_preferences(config: dict[str, Any]) -> None:
    """Write the keys of preference data and the metrics of validation sets in this project's terms."""
    data = config.get("data")
    if isinstance(data, dict):
        paths = data.pop("val_data_paths", None)  # keyed by the set's name in metrics
        if isinstance(paths, dict) and not data.get("validation"):
            data["validation"] = [{"name": key, "data_path": path} for key, path in paths.items()]
        name = at(data, ["train", "dataset_name"])
        if name is not None and at(data, ["default", "dataset_name"]) is None:  # the flat section has one for all
            for one in dataset_sections(data, ("validation",)):
                one.setdefault("dataset_name", name)
        for one in (one for one in dataset_sections(data) if "prompt_key" in one):
            one.setdefault("input_key", one.pop("prompt_key"))
    section = config.get("checkpointing")
    metric = section.get("metric_name") if isinstance(section, dict) else None
    if isinstance(section, dict) and isinstance(metric, str):
        section["metric_name"] = _rename_preference_metric(metric, data if isinstance(data, dict) else {})


def _rename_preference_metric(text: str, data: dict[str, Any]) -> str:
    """Return `val:<set>/<metric>`, or `val:<metric>` of the only set.

    Example: "validation-my_sft_loss" is the loss of the set "my_sft" if that exists, else "sft_loss" of "my".
    """
    match = PREFERENCE_METRIC.fullmatch(text)
    if match is None:
        return text
    splits = [
        (match["name"].removesuffix(f"_{metric}"), metric)
        for metric in PREFERENCE_METRICS
        if match["name"].endswith(f"_{metric}")
    ]
    if not splits:
        return text
    sets = list(dataset_sections(data, ("validation",)))
    names = [one.get("name") for one in sets]
    name, metric = next((split for split in splits if split[0] in names), splits[0])
    is_only = len(sets) == 1 and not at(data, ["train", "split_validation_size"])
    return f"val:{metric}" if name == "default" or (is_only and name in names) else f"val:{name}/{metric}"


def dataset_sections(
    data: dict[str, Any], fields: Sequence[str] = (*DATASET_FIELDS, "default")
) -> Iterator[dict[str, Any]]:
    """Yield the section, or the list of sections, of each of the fields of `data`."""
    for field in fields:
        sections = data.get(field)
        yield from (one for one in (sections if isinstance(sections, list) else [sections]) if isinstance(one, dict))
