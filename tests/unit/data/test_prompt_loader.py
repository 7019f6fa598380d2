"""The order of prompts in training, and its resumption."""

import pytest

from nemo_rl.data.prompt_loader import PromptLoader
from nemo_rl.errors import DataError
from nemo_rl.types import Message, Prompt

PROMPTS = tuple(Prompt(f"p{i}", "math", (Message("user", str(i)),)) for i in range(7))


def loader(prompts=PROMPTS, *, shuffle=True, seed=3, max_epochs=3) -> PromptLoader:
    return PromptLoader(prompts, shuffle=shuffle, seed=seed, max_epochs=max_epochs)


def ids(taken) -> list[tuple[str, int]]:
    return [(each.prompt.prompt_id, each.epoch) for each in taken]


def test_unshuffled_prompts_cross_epochs_in_order():
    ordered = loader(shuffle=False)
    assert ids(ordered.take(5)) == [(f"p{i}", 0) for i in range(5)]
    assert ids(ordered.take(4)) == [("p5", 0), ("p6", 0), ("p0", 1), ("p1", 1)]
    assert (ordered.consumed, ordered.epoch) == (9, 1)


def test_last_batch_is_short_and_then_nothing_comes():
    spent = loader(max_epochs=1)
    assert [len(spent.take(3)) for _ in range(4)] == [3, 3, 1, 0]
    assert (spent.consumed, spent.epoch) == (7, 1)


def test_each_epoch_holds_every_prompt_once_in_its_own_order():
    shuffled = loader()
    epochs = [[name for name, _ in ids(shuffled.take(7))] for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(p.prompt_id for p in PROMPTS)] * 3
    assert epochs[0] != epochs[1]


def test_order_depends_on_the_seed_alone():
    assert ids(loader().take(14)) == ids(loader().take(14))
    assert ids(loader().take(14)) != ids(loader(seed=4).take(14))


@pytest.mark.parametrize("taken_before", [0, 1, 7, 10, 21])
def test_resumed_loader_goes_on_as_the_uninterrupted_one(taken_before):
    uninterrupted = loader()
    uninterrupted.take(taken_before)
    resumed = loader()
    resumed.load_state_dict(uninterrupted.state_dict())
    assert resumed.consumed == taken_before
    assert ids(resumed.take(21)) == ids(uninterrupted.take(21))


@pytest.mark.parametrize("other", [loader(PROMPTS[:-1]), loader(seed=4), loader(shuffle=False)])
def test_state_of_other_data_or_another_order_is_refused(other):
    with pytest.raises(DataError, match="other training prompts"):
        other.load_state_dict(loader().state_dict())


def test_no_prompts_are_refused():
    with pytest.raises(DataError, match="no prompts"):
        loader(())


def mixed(*, shuffle=False, mix=(1, 2), sizes=(2, 5)) -> PromptLoader:
    return PromptLoader(PROMPTS, shuffle=shuffle, seed=3, max_epochs=3, sizes=sizes, mix=mix)


def test_datasets_of_a_mix_take_turns_and_the_smaller_one_begins_again():
    taken = ids(mixed().take(12))
    assert [name for name, _ in taken] == ["p0", "p2", "p3", "p1", "p4", "p5", "p0", "p6", "p2", "p1", "p3", "p4"]
    assert [epoch for _, epoch in taken] == [0, 0, 0, 0, 0, 0, 1, 0, 1, 1, 1, 1]


def test_each_epoch_of_a_mixed_dataset_holds_its_prompts_once():
    names = [name for name, _ in ids(mixed(shuffle=True).take(21))]
    small, large = [n for n in names if n in ("p0", "p1")], [n for n in names if n not in ("p0", "p1")]
    assert len(small) == 7
    assert sorted(small[:2]) == sorted(small[2:4]) == ["p0", "p1"]
    assert sorted(large[:5]) == sorted(large[5:10]) == ["p2", "p3", "p4", "p5", "p6"]


def test_a_resumed_mix_goes_on_and_another_mix_is_refused():
    uninterrupted, resumed = mixed(shuffle=True), mixed(shuffle=True)
    uninterrupted.take(8)
    resumed.load_state_dict(uninterrupted.state_dict())
    assert ids(resumed.take(10)) == ids(uninterrupted.take(10))
    with pytest.raises(DataError, match="other training prompts"):
        mixed(shuffle=True, mix=(2, 1)).load_state_dict(uninterrupted.state_dict())


def test_a_mix_needs_prompts_of_every_dataset():
    with pytest.raises(DataError, match=r"datasets of \[0, 7\] prompts"):
        mixed(sizes=(0, 7))
