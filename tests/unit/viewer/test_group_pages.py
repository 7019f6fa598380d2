import re
from pathlib import Path

import pytest

from nemo_rl.errors import DataError
from nemo_rl.viewer.group_pages import difference_page, group_page, groups_page
from nemo_rl.viewer.viewer_sources import ViewerSource
from tests.unit.viewer.rundirs import rollout, write_run

GROUPS = {"wrong": [0.0, 0.0], "mixed": [0.0, 1.0], "right": [1.0, 1.0]}


@pytest.fixture
def run(tmp_path: Path) -> ViewerSource:
    train = [
        rollout(step, group=name, index=index, reward=reward, env_state={"answer": f"{name} at {step}"})
        for step in (1, 2)
        for name, rewards in GROUPS.items()
        for index, reward in enumerate(rewards)
    ]
    train += [
        rollout(3, group="long", index=index, reward=float(index), text=text)
        for index, text in enumerate(("the sum of two and two is four", "the sum of two and three is five"))
    ]
    return ViewerSource.open(write_run(tmp_path / "exp_001", train=train))


@pytest.mark.parametrize(
    ("values", "ids"),
    [
        ({"outcome": "wrong"}, ["2:wrong", "1:wrong"]),
        ({"outcome": "right", "step": "1"}, ["1:right"]),
        ({"step": "2"}, ["2:wrong", "2:mixed", "2:right"]),
        ({"outcome": "none of these", "step": "3"}, ["3:long"]),
        ({"outcome": "wrong", "step": "3"}, []),
    ],
)
def test_groups_are_listed_by_outcome_and_step_newest_first(
    run: ViewerSource, values: dict[str, str], ids: list[str]
) -> None:
    assert [row["id"] for row in groups_page(run, values).context["rows"]] == ids


def test_row_of_a_group_has_its_expected_answer_and_rewards(run: ViewerSource) -> None:
    (row,) = groups_page(run, {"outcome": "mixed", "step": "2"}).context["rows"]
    assert (row["target"], row["mean"], row["low"], row["high"], row["count"]) == ("mixed at 2", 0.5, 0, 1, 2)


def test_counts_are_those_of_the_step(run: ViewerSource) -> None:
    assert groups_page(run, {}).context["counts"] == {"wrong": 2, "mixed": 3, "right": 2}
    assert groups_page(run, {"step": "3"}).context["counts"] == {"wrong": 0, "mixed": 1, "right": 0}


def test_best_and_worst_of_a_group_differ_in_the_marked_words(run: ViewerSource) -> None:
    best, worst = group_page(run, "train", {"group": "3:long", "step": "3"}).context["extremes"]
    page = difference_page(run, "train", {"first": best, "second": worst})
    own = [[text for text, is_own in side if is_own] for side in page.context["sides"]]
    assert own == [["three", "five"], ["two", "four"]]
    assert [reward for _, reward in page.context["members"]] == [0.0, 1.0]
    assert ["".join(text for text, _ in side) for side in page.context["sides"]] == [
        "the sum of two and three is five",
        "the sum of two and two is four",
    ]


@pytest.mark.parametrize(
    "values", [{}, {"first": "0.0"}, {"first": "0.0", "second": "0.99"}, {"first": "x", "second": "y"}]
)
def test_difference_of_rollouts_that_are_not_there_says_so(run: ViewerSource, values: dict[str, str]) -> None:
    with pytest.raises(DataError, match=re.escape("there is no rollout")):
        difference_page(run, "train", values)
