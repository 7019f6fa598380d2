import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.errors import ConfigError
from nemo_rl.viewer.compare import PairedDifference, compare, compare_page, paired_interval, student_quantile, to_dict
from nemo_rl.viewer.site import Renderer
from nemo_rl.viewer.viewer_sources import ViewerSource
from tests.unit.viewer.rundirs import rollout, write_collection, write_lines, write_run


def make_source(directory: Path, kind: str = "run") -> ViewerSource:
    assert kind in ("run", "collection")
    return ViewerSource(directory.name, directory, kind, directory.parent / "cache").complete()  # pyright: ignore[reportArgumentType]


def make_run(directory: Path, *, lr: float, gain: float, config: str = "") -> ViewerSource:
    metrics = [{"step": step, "train/reward": 0.1 * step + gain} for step in range(1, 5)]
    validation = [rollout(4, group=f"p{p}", reward=0.5 + gain * (p != 0), env="ab"[p % 2]) for p in range(4)]
    text = config or f"policy:\n  optimizer: {{lr: {lr}}}\ngrpo:\n  seed: 1\n"
    return make_source(write_run(directory, metrics=metrics, validation=validation, config=text))


def find(differences: tuple[PairedDifference, ...], quantity: str) -> PairedDifference:
    return next(each for each in differences if each.quantity == quantity)


def test_configurations_differ_in_the_keys_that_differ(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, lr=lr, gain=0.0) for name, lr in (("a", 0.1), ("b", 0.2))]
    assert compare(runs).config == (("policy.optimizer.lr", ("0.1", "0.2")),)


def test_differences_are_paired_by_step_and_prompt(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, lr=0.1, gain=gain) for name, gain in (("a", 0.0), ("b", 0.25))]
    result = compare(runs)
    reward = find(result.differences, "train/reward")
    assert (reward.first, reward.second, reward.difference) == pytest.approx((0.25, 0.5, 0.25))
    assert reward.num_pairs == 4
    assert reward.is_significant
    prompts = find(result.differences, "validation prompts, step 4")
    # differences 0, .25, .25, .25: mean .1875, standard error .0625, t of 3 degrees 3.182
    assert (prompts.difference, prompts.low, prompts.high) == pytest.approx((0.1875, -0.0114, 0.3864), abs=2e-3)
    assert not prompts.is_significant
    assert find(result.differences, "validation prompts, step 4, env/b").difference == pytest.approx(0.25)
    assert json.loads(json.dumps(to_dict(result)))["names"] == ["a", "b"]


def test_interval_is_that_of_student() -> None:
    assert paired_interval([1, 2, 3]) == pytest.approx((2, -0.484, 4.484), abs=1e-3)
    assert paired_interval([1.0]) == (1.0, None, None)
    assert paired_interval([]) == (None, None, None)


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (100, 1.9840)]
)
def test_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert student_quantile(degrees) == pytest.approx(quantile, rel=2e-4)


def test_run_is_not_compared_with_a_collection(tmp_path: Path) -> None:
    rows = [rollout(task_index=0, rollout_index=0, seed=0)]
    write_lines(tmp_path / "words" / "rollouts-rs0.jsonl", rows)
    sources = [make_run(tmp_path / "a", lr=0.1, gain=0.0), make_source(tmp_path / "words", "collection")]
    with pytest.raises(ConfigError, match="words is a collection"):
        compare(sources)
    with pytest.raises(ConfigError, match="needs two or more"):
        compare(sources[:1])


def make_collection(directory: Path, rewards: Sequence[Sequence[float]]) -> ViewerSource:
    return make_source(write_collection(directory, rewards), "collection")


HARDER = ((0, 0), (0, 1), (1, 0), (1, 1))
EASIER = ((0, 1), (1, 0), (1, 1), (1, 1))


def test_collections_are_compared_task_by_task(tmp_path: Path) -> None:
    result = compare([make_collection(tmp_path / "a", HARDER), make_collection(tmp_path / "b", EASIER)])
    # by task .5, 0, .5, 0: mean .25, standard error .1443, t of 3 degrees 3.182
    reward = find(result.differences, "reward")
    assert (reward.first, reward.second, reward.num_pairs) == pytest.approx((0.5, 0.75, 4))
    assert (reward.difference, reward.low, reward.high) == pytest.approx((0.25, -0.2093, 0.7093), abs=1e-3)
    # by task 1, 0, 0, 0: mean .25, standard error .25
    solved = find(result.differences, "pass@2")
    assert (solved.first, solved.second, solved.difference) == pytest.approx((0.75, 1.0, 0.25))
    assert (solved.low, solved.high) == pytest.approx((0.25 - 0.7956, 0.25 + 0.7956), abs=5e-3)
    assert not reward.is_significant
    assert not solved.is_significant
    tokens = find(result.differences, "tokens")
    assert (tokens.difference, tokens.low, tokens.high) == (0, 0, 0)


def test_collections_of_different_tasks_are_compared_by_their_means(tmp_path: Path) -> None:
    first = make_collection(tmp_path / "a", HARDER)
    result = compare([first, make_collection(tmp_path / "b", EASIER[:3])])
    reward = find(result.differences, "reward")
    # means .5 and .6667 with standard errors .2041 and .1667: .2635; t of 2 degrees 4.303
    assert reward.num_pairs == 3
    assert (reward.difference, reward.low, reward.high) == pytest.approx((0.1667, -0.9671, 1.3005), abs=2e-3)


def share_within(half: float, degrees: int) -> float:
    """Return how much of Student's distribution lies within `half` of 0: its density's integral."""
    x = np.linspace(-half, half, 20_001)
    n = degrees
    scale = math.exp(math.lgamma((n + 1) / 2) - math.lgamma(n / 2)) / math.sqrt(n * math.pi)
    return float(np.trapezoid(scale * (1 + x**2 / n) ** (-(n + 1) / 2), x))


@settings(max_examples=30, deadline=None)
@given(values=st.lists(st.tuples(st.integers(-8, 8), st.integers(-8, 8)), min_size=2, max_size=30))
def test_an_interval_holds_95_percent_and_turns_round_with_the_order(values: list[tuple[int, int]]) -> None:
    differences = np.array([b - a for a, b in values], np.float64)
    mean, low, high = paired_interval(differences)
    assert mean is not None
    assert low is not None
    assert high is not None
    error = float(differences.std(ddof=1)) / math.sqrt(len(values))
    assert mean == pytest.approx(differences.mean())
    if error > 0:
        assert share_within((high - mean) / error, len(values) - 1) == pytest.approx(0.95, abs=1e-4)
    assert high - mean == pytest.approx(mean - low)
    assert paired_interval(-differences) == pytest.approx((-mean, -high, -low))
    assert paired_interval(differences[::-1]) == pytest.approx((mean, low, high))


def test_page_of_two_collections_has_their_differences(tmp_path: Path) -> None:
    sources = [make_collection(tmp_path / "a", HARDER), make_collection(tmp_path / "b", ((1, 1),) * 4)]
    body = Renderer().page(compare_page(sources))
    row = re.search(r"<tr><th scope=\"row\">reward ?.*?</tr>", body)
    assert row is not None
    cells = [re.sub(r"<[^>]+>", "", cell).strip() for cell in re.findall(r"<t[dh][^>]*>.*?</t[dh]>", row[0])]
    assert cells == ["reward", "0.5", "1", "0.5", "-0.1496 to 1.15", "4"]


def test_page_has_curves_over_each_other(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, lr=0.1, gain=gain) for name, gain in (("a", 0.0), ("b", 0.25))]
    (picture,) = compare_page(runs).context["charts"]
    assert picture.count("<polyline") == 2
    assert "train/reward" in picture
