"""Wrong values of every key that a command reads: each is refused by name, before a model loads.

Loading lists every problem of a recipe, so a recipe holds a wrong value for many keys at once; what such a recipe does
not refuse by name is tried in one of its own.
"""

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from pydantic.fields import FieldInfo

from nemo_rl.config import loading
from nemo_rl.config.keys import kind_of_field, sections_in
from nemo_rl.config.kinds import Section
from nemo_rl.config.reference import find_schema
from nemo_rl.errors import ConfigError, flatten_config_errors

HUGE = 10**20
MAX_KEYS = 40  # wrong values in one recipe
POLICY = {"model_name": "m", "train_global_batch_size": 8, "train_micro_batch_size": 4}
PAIRS = {"train": {"dataset_name": "HelpSteer3"}}
SUPERVISED: dict[str, Any] = {"policy": POLICY, "data": {"train": {"dataset_name": "gsm8k"}}}
ROLLOUTS: dict[str, Any] = {**SUPERVISED, "env": {"math": {}}}
SAMPLED: dict[str, Any] = {
    "policy": {"model_name": "m"},
    "data": {"input": {"dataset_name": "gsm8k"}},
    "env": {"math": {}},
}
STEPS = {"num_prompts_per_step": 4, "num_generations_per_prompt": 2}
RECIPES: dict[str, dict[str, Any]] = {  # by command, as small as its schema allows
    "grpo": {**ROLLOUTS, "grpo": STEPS},
    "distill": {**ROLLOUTS, "distillation": STEPS, "teacher": {"model_name": "t"}},
    "sft": {**SUPERVISED, "sft": {}},
    "dpo": {"policy": POLICY, "data": PAIRS, "dpo": {}},
    "rm": {"policy": POLICY, "data": PAIRS, "rm": {}},
    "eval": {**SAMPLED, "eval": {}},
    "collect": {**SAMPLED, "collect": {"output_dir": "out"}},
}
SERVER = {"base_urls": ["http://127.0.0.1:1"], "model": "s"}
REQUIRED: dict[str, dict[str, Any]] = {  # keys without which the others of a section are not read
    "scorers.reward_model": {"model_name": "r"},
    "scorers.judge": {**SERVER, "prompt": "{{ response }}"},
    "scorers.classify": SERVER,
    "scorers.function": {"function": "math:floor"},
    "teacher.server": SERVER,
    "teachers.x": {"model_name": "t"},
    "teachers.x.server": SERVER,
    "data.validation": {"dataset_name": "gsm8k"},
    "env.tagged_answers": {"reward_functions": [{"name": "format"}]},
}
LEFT_OUT = {"grpo": ("teacher", "teachers")}  # needs another algorithm
MEANINGS: dict[str, tuple[object, ...]] = {  # NeMo-RL's: never, as in training, all
    "val_period": (-1,),
    "val_temperature": (-1,),
    "val_batch_size": (None,),
    "policy.dtensor_cfg.context_parallel_size": (None,),
    "policy.dtensor_cfg.expert_parallel_size": (None,),
    "policy.megatron_cfg.context_parallel_size": (None,),
    "policy.megatron_cfg.expert_model_parallel_size": (None,),
    "policy.megatron_cfg.expert_tensor_parallel_size": (None,),
    "teacher.logprob_batch_size": (None,),
    "teachers.x.logprob_batch_size": (None,),
    "collect.seeds": (7,),  # a seed
}


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a command, with the values of others by which it is read."""

    name: str
    info: FieldInfo
    owner: type[Section]  # the section that declares it
    entries: tuple[tuple[str, object], ...] = ()  # of kinds, by the keys that name them

    @property
    def kinds(self) -> list[Any]:
        return list(members(self.info.annotation))

    @property
    def is_section(self) -> bool:
        return kind_of_field(self.info) is not None or any(is_section(kind) for kind in self.kinds)


def is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def walk(section: type[Section], prefix: str = "", entries: tuple[tuple[str, object], ...] = ()) -> Iterator[Key]:
    """Yield every key of a section and of those in it; of each kind, those of all its entries."""
    for name, info in section.model_fields.items():
        if info.exclude:
            continue
        owner = next(cls for cls in section.__mro__ if name in vars(cls).get("__annotations__", {}))
        yield Key(key := f"{prefix}{name}", info, owner, entries)
        if (kind := kind_of_field(info)) is None:
            if not any(is_section(one) or get_origin(one) is dict for one in members(info.annotation)):
                continue  # a list of sections: its keys have an index
            for inner in sections_in(info.annotation):
                below = ".x" if any(get_origin(one) is dict for one in members(info.annotation)) else ""
                yield from walk(inner, f"{key}{below}.", entries)
            continue
        for entry in [kind.default] if kind.is_fixed and kind.default else kind.installed:
            if get_origin(info.annotation) is dict:
                yield from walk(kind.section(entry), f"{key}.{entry}.", entries)
            else:
                named = ((f"{key}.{kind.name_key}", entry),)
                chosen = named if not kind.is_fixed else ((f"{key}.enabled", True),) if entry == "megatron" else ()
                yield from walk(kind.section(entry), f"{key}.", (*entries, *chosen))


def members(annotation: Any) -> Iterator[Any]:
    """Yield the types of a union, without None."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        for one in get_args(annotation):
            yield from members(one)
    elif annotation is not type(None):
        yield annotation


def wrong_values(key: Key) -> Iterator[object]:  # one branch per type  # noqa: C901
    """Yield values of other types than the key's, and those beyond its bounds."""
    kinds, info = key.kinds, key.info
    if key.is_section:
        yield "text"
        return
    if Any in kinds:
        return
    yield 7 if any(get_origin(kind) is dict for kind in kinds) else {"a": 1}
    if any(get_origin(kind) is Literal for kind in kinds):
        yield "no_such_choice"
    if float in kinds:
        yield from ("fast", float("nan"), float("inf"))
    elif int in kinds:
        yield from ("many", 1.5, HUGE)
    if kinds in ([int], [float]):
        yield True
    if bool in kinds and str not in kinds:
        yield "maybe"
    if float in kinds or int in kinds:
        yield from ([], "", 10**19)
    if type(None) not in get_args(info.annotation) and kinds in ([int], [float]) and not info.is_required():
        yield None
    if str in kinds and not any(get_origin(kind) in (Literal, list) for kind in kinds):
        yield from (["x"], "", " ", "null\0character", True)
    for kind in kinds:
        if get_origin(kind) is list:
            yield from ("text", 7)
            items = list(members(get_args(kind)[0]))
            yield from ([""], ["a\0"]) if items == [str] else ([-1], ["a"], [1.5], [HUGE]) if items == [int] else ([7],)
    for bound in bounds_of(info.annotation, info.metadata):
        for name, step in (("ge", -1), ("gt", 0), ("le", 1), ("lt", 0)):
            if (limit := getattr(bound, name, None)) is not None:
                yield limit + (step if limit < 2**53 or isinstance(limit, int) else limit)


def bounds_of(annotation: Any, metadata: Sequence[Any] = ()) -> Iterator[Any]:
    """Yield the bounds of a field, those of the members of its union included."""
    for one in metadata:
        yield from bounds_of(None, one.metadata) if isinstance(one, FieldInfo) else (one,)
    if get_origin(annotation) is Annotated:
        yield from bounds_of(get_args(annotation)[0], get_args(annotation)[1:])
    elif get_origin(annotation) in (Union, types.UnionType):
        for one in get_args(annotation):
            yield from bounds_of(one)


@dataclass(slots=True)
class Round:
    """Wrong values that stand in one recipe, by key; none of the keys is below another."""

    entries: tuple[tuple[str, object], ...]
    values: dict[str, object] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)  # the keys and all above them

    def takes(self, key: Key) -> bool:
        is_full = len(self.values) == MAX_KEYS
        return not is_full and key.name not in self.names and not any(one in self.values for one in above(key.name))

    def add(self, key: Key, value: object) -> None:
        self.values[key.name] = value
        self.names |= {key.name, *above(key.name)}


def above(key: str) -> list[str]:
    """Return the keys of the sections that hold a key. Example: a.b.c: a, a.b."""
    return list(accumulate(key.split(".")[:-1], lambda upper, name: f"{upper}.{name}"))


@cache
def bad_keys() -> Mapping[str, list[tuple[Key, object]]]:
    """Return the cases of each command: all wrong values of a key where it is met first, elsewhere one."""
    cases: dict[str, list[tuple[Key, object]]] = {}
    seen: set[tuple[type[Section], str]] = set()
    for command in RECIPES:
        cases[command] = []
        for key in walk(find_schema(command)):
            if key.name.startswith(LEFT_OUT.get(command, ())):
                continue
            last = key.name.rpartition(".")[2]
            meanings = (*MEANINGS.get(last, ()), *MEANINGS.get(key.name, ()))
            values = [one for one in wrong_values(key) if one not in meanings or isinstance(one, bool)]
            cases[command] += [(key, one) for one in (values[:1] if (key.owner, last) in seen else values)]
            seen.add((key.owner, last))
    return cases


def rounds_of(cases: Sequence[tuple[Key, object]]) -> list[Round]:
    """Return the cases as rounds; a required key is alone, since loading ends where one is missing."""
    rounds: list[Round] = []
    alone: list[Round] = []
    for key, value in cases:
        fitting = (one for one in rounds if one.entries == key.entries and one.takes(key))
        if key.info.is_required() or (chosen := next(fitting, None)) is None:
            chosen = Round(key.entries)
            (alone if key.info.is_required() else rounds).append(chosen)
        chosen.add(key, value)
    return rounds + alone


def with_values(command: str, values: Mapping[str, object]) -> dict[str, Any]:
    """Return the smallest recipe of a command with keys set."""
    recipe: dict[str, Any] = yaml.safe_load(yaml.safe_dump(RECIPES[command]))
    for key, value in values.items():
        *_, name = key.split(".")
        node = recipe
        for section in above(key):
            parent = section.rpartition(".")[2]
            if not isinstance(node.get(parent), dict):
                node[parent] = dict(REQUIRED.get(section, {}))
            node = node[parent]
        node[name] = value
    return recipe


def refusals(command: str, values: Mapping[str, object], path: Path) -> list[str]:
    """Return the keys that loading a recipe refuses; what else happens is one text in capitals."""
    path.write_text(yaml.safe_dump(with_values(command, values)))
    try:
        loading.LOADERS[command](path)
    except ConfigError as error:
        return [one.key for one in flatten_config_errors([error])]
    except BaseException as error:
        return [f"CRASH {type(error).__name__}: {error}"]
    return ["ACCEPTED"]


def is_named(key: str, refused: Sequence[str]) -> bool:
    return any(f"{one}.".startswith(f"{key}.") for one in refused)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", RECIPES)
def test_every_key_refuses_values_of_other_types_and_beyond_its_bounds(command: str, tmp_path: Path) -> None:
    failures = []
    for one in rounds_of(bad_keys()[command]):
        refused = refusals(command, {**dict(one.entries), **one.values}, tmp_path / "all.yaml")
        for key, value in one.values.items():
            if not is_named(key, refused):
                alone = refusals(command, {**dict(one.entries), key: value}, tmp_path / "one.yaml")
                if not is_named(key, alone):
                    failures.append((key, value, alone))
    assert not failures, "\n".join(map(str, failures))


def test_there_are_6000_bad_values_of_keys() -> None:
    assert sum(map(len, bad_keys().values())) >= 6000
