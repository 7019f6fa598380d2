"""`data`: the data sets of training and validation, or those of a collection."""

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from nemo_rl.config.section import Section


class DatasetConfig(Section):
    """One data set; what is None comes from `data.default`."""

    dataset_name: str | None = None  # jsonl, huggingface, reasoning_gym, nemo_gym, a registered name, a dotted path
    name: str | None = None  # in metrics; None: dataset_name, numbered where it is not unique
    data_path: str | None = None  # jsonl, nemo_gym: a file; huggingface: a hub name or a folder
    subset: str | None = None  # huggingface: the configuration's name
    split: str | None = None  # huggingface
    input_key: str | None = None  # the field with the question; None: "messages" where present, else "input"
    output_key: str | None = None  # the field with the answer; None: "output"
    task: str | None = None  # reasoning_gym: the name of the task
    task_kwargs: dict[str, Any] = Field(default_factory=dict)  # reasoning_gym: its options
    size: int | None = Field(default=None, gt=0)  # rows at most (reasoning_gym: rows generated)
    repeat: int | None = Field(default=None, gt=0)  # times that the set stands in its blend; None: once
    seed: int | None = None  # of generated rows; None: from grpo.seed and the set's place
    agent_name: str | None = None  # nemo_gym: the agent of rows that name none
    env_name: str | None = None  # a key of `env`; None: the task or data set of that name
    processor: str | None = None  # a registered name or a dotted path; None: by the row's shape
    prompt_file: str | None = None  # text with {} where the question goes
    system_prompt_file: str | None = None


class BaseDataConfig(Section):
    """What any choice of data sets has."""

    fields_of_sets: ClassVar[tuple[str, ...]]

    max_input_seq_length: int | None = Field(default=None, gt=0)  # tokens of a prompt; None: room for one new token
    default: DatasetConfig = DatasetConfig()

    @property
    def sets(self) -> Iterator[tuple[str, DatasetConfig]]:
        """Every data set with its key; a list that names none is left to the caller."""
        for name in self.fields_of_sets:
            sets = getattr(self, name)
            if isinstance(sets, list):
                yield from ((f"data.{name}.{index}", one) for index, one in enumerate(sets))
            elif sets is not None:
                yield f"data.{name}", sets


class DataConfig(BaseDataConfig):
    """Of training."""

    fields_of_sets: ClassVar[tuple[str, ...]] = ("train", "validation")

    shuffle: bool = True
    disjoint: bool = True  # prompts of the validation sets are left out of training
    train: DatasetConfig | list[DatasetConfig]
    validation: DatasetConfig | list[DatasetConfig] | None = None


class InputDataConfig(BaseDataConfig):
    """Of a collection."""

    fields_of_sets: ClassVar[tuple[str, ...]] = ("input",)

    input: DatasetConfig | list[DatasetConfig]  # one behind the other: a task's index is its place in all of them
    seed: int = 42  # of generated rows, where their set names none
