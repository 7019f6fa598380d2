import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from nemo_rl.viewer import charts
from nemo_rl.viewer.charts import ChartLine, ChartView
from nemo_rl.viewer.distributions import distribution_charts, expert_load_chart, group_table, outcome_lines
from nemo_rl.viewer.site import Renderer, find_page
from nemo_rl.viewer.viewer_sources import ViewerSource, ViewerSources
from tests.unit.viewer.rundirs import failed, rollout, write_run


def points(chart: str) -> list[str]:
    """Return what a chart says under the pointer, in the order of the steps."""
    (found,) = re.findall(r'data-points="([^"]*)"', chart)
    return [text for _, text in json.loads(found.replace("&#34;", '"'))]


def test_smoothing_has_no_bias_towards_zero() -> None:
    assert charts.smooth({1: 1.0, 2: 2.0}, 0.5) == pytest.approx({1: 1.0, 2: (0.25 + 1.0) / 0.75})
    assert charts.smooth({3: 7.0, 4: 7.0, 9: 7.0}, 0.9) == pytest.approx({3: 7.0, 4: 7.0, 9: 7.0})


def test_every_line_is_named_under_the_pointer_at_the_steps_that_it_has() -> None:
    chart = charts.line_chart("reward", [ChartLine("a", {1: 0.5, 2: 0.75}), ChartLine("b", {2: 0.25})])
    assert points(chart) == ["step 1: a 0.5", "step 2: a 0.75, b 0.25"]


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (ChartView(), ["step 1: 0", "step 2: 10", "step 3: 1,000"]),
        (ChartView(is_log=True), ["step 2: 10", "step 3: 1,000"]),
        (ChartView(first=2, last=2), ["step 2: 10"]),
    ],
    ids=["all", "positive values on a logarithmic axis", "chosen steps"],
)
def test_view_chooses_the_values_that_are_drawn(view: ChartView, expected: list[str]) -> None:
    lines = [ChartLine("a", {1: 0.0, 2: 10.0, 3: 1000.0, 4: math.nan})]
    assert points(charts.line_chart("norm", lines, view=view)) == expected


def test_logarithmic_axis_puts_the_geometric_mean_in_the_middle() -> None:
    frame = charts.Frame((0, 1), (0.0, 4.0), is_log=True)
    low, middle, high = (frame.at(0, value)[1] for value in (1, 100, 10_000))
    assert middle == pytest.approx((low + high) / 2)


def test_line_keeps_its_colour_if_one_before_it_has_no_value() -> None:
    chart = charts.line_chart("reward", [ChartLine("a", {}), ChartLine("b", {1: 1.0, 2: 2.0})])
    assert 'class="line c1"' in chart
    assert "c0" not in chart


def test_heat_map_shows_the_share_of_each_steps_values() -> None:
    steps, values = np.array([1, 1, 1, 1, 2, 2]), np.array([0.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    cells = re.findall(r"<title>([^<]*)</title>", charts.heat_map("rewards", steps, values, num_rows=2))
    assert cells == ["step 1, 0 to 0.5: 75%", "step 1, 0.5 to 1: 25%", "step 2, 0.5 to 1: 100%"]


@pytest.mark.parametrize(
    ("steps", "values"),
    [([], []), ([1, 1], [0.0, 1.0]), ([1, 2], [0.5, 0.5]), ([1, 2], [math.nan, 1.0])],
    ids=["none", "one step", "equal values", "one finite value"],
)
def test_heat_map_without_a_spread_is_left_out(steps: list[int], values: list[float]) -> None:
    assert charts.heat_map("rewards", np.array(steps), np.array(values)) == ""


GROUPS = {"wrong": [0.0, 0.0], "mixed": [0.0, 1.0], "half": [0.5, 0.5], "right": [1.0, 1.2]}


@pytest.fixture
def run(tmp_path: Path) -> ViewerSource:
    train = [
        rollout(step, group=name, index=index, reward=reward)
        for step in (1, 2)
        for name, rewards in GROUPS.items()
        if step == 1 or name != "wrong"
        for index, reward in enumerate(rewards)
    ]
    train += [failed(1, group="wrong", index=2), failed(2, group="broken")]
    metrics = [{"step": step, "train/reward": step / 4, "train/loss": 0.5 / step} for step in (1, 2, 3)]
    return ViewerSource.open(write_run(tmp_path / "exp_001", train=train, metrics=metrics))


def test_groups_are_wrong_mixed_or_right_without_their_failed_rollouts(run: ViewerSource) -> None:
    groups = group_table(run.split("train"))
    assert groups.step.tolist() == [1, 1, 1, 1, 2, 2, 2]
    assert groups.count.tolist() == [2] * 7
    assert groups.mean.tolist() == pytest.approx([0, 0.5, 0.5, 1.1, 0.5, 0.5, 1.1])
    shares = {line.label: line.values for line in outcome_lines(groups)}
    assert shares["all wrong"] == {1: 0.25, 2: 0.0}
    assert shares["mixed"] == pytest.approx({1: 0.5, 2: 2 / 3})
    assert shares["all right"] == pytest.approx({1: 0.25, 2: 1 / 3})


def test_run_without_rollouts_has_no_distributions(tmp_path: Path) -> None:
    assert distribution_charts(ViewerSource.open(write_run(tmp_path / "exp_001")).split("train")) == []


def test_the_load_of_experts_is_drawn_of_runs_that_have_it(tmp_path: Path) -> None:
    names = {"p0": 0.0, "p10": 0.25, "p50": 1.0, "p90": 1.5, "max": 3.0}
    loads = {f"train/moe/load_{name}_over_mean": value for name, value in names.items()}
    write_run(tmp_path / "exp_001", metrics=[{"step": 1, **loads}])
    write_run(tmp_path / "exp_002", metrics=[{"step": 1, "train/loss": 1.0}])
    sources = ViewerSources.open([tmp_path], cache=tmp_path / "cache")
    for source in sources.by_id.values():
        source.complete()
    chart = expert_load_chart(sources.get("exp_001").metrics)
    (text,) = points(chart)
    assert text == "step 1: least 0, 10th percentile 0.25, median 1, 90th percentile 1.5, most 3"
    assert "Load of experts" in html(sources, "/charts?run=exp_001")
    assert "Load of experts" not in html(sources, "/charts?run=exp_002")


@pytest.fixture
def sources(run: ViewerSource) -> ViewerSources:
    write_run(run.path.parent / "exp_002", metrics=[{"step": 2, "train/reward": 0.9, "env/a<b/turns": 3.0}])
    opened = ViewerSources.open([run.path.parent], cache=run.path.parent / "cache")
    for source in opened.by_id.values():
        source.complete()
    return opened


def html(sources: ViewerSources, address: str) -> str:
    return Renderer().page(find_page(sources, address))


@pytest.mark.parametrize(
    ("query", "charts"),
    [
        ("run=exp_001&run=exp_002&metric=train/reward", {"train/reward"}),
        ("run=exp_001&metric=train/*", {"train/reward", "train/loss"}),
        ("run=exp_002&metric=env/*,train/r*", {"train/reward", "env/a&lt;b/turns"}),
        ("run=exp_001&metric=nothing", set()),
    ],
)
def test_address_chooses_metrics_by_pattern(sources: ViewerSources, query: str, charts: set[str]) -> None:
    page = html(sources, f"/charts?{query}")
    titles = {re.sub(r"</?a[^>]*>", "", text) for text in re.findall(r"<figcaption>(.*?)<output>", page)}
    assert titles == charts


def test_runs_lie_over_each_other_and_their_values_are_smoothed(sources: ViewerSources) -> None:
    page = html(sources, "/charts?run=exp_001&run=exp_002&metric=train/reward&smooth=0.5")
    # 0.25, then (0.25 * 0.25 + 0.5 * 0.5) / 0.75, then (0.125 * 0.25 + 0.25 * 0.5 + 0.5 * 0.75) / 0.875
    assert points(page) == ["step 1: exp_001 0.25", "step 2: exp_001 0.4167, exp_002 0.9", "step 3: exp_001 0.6071"]


def test_all_metrics_fit_one_chart(sources: ViewerSources) -> None:
    page = html(sources, "/charts?run=exp_001&metric=train/*&together=1&from=2&to=2")
    assert points(page) == ["step 2: train/loss 0.25, train/reward 0.5"]


@pytest.mark.parametrize("value", ["", "much", "-1", "nan", "1e9", "0.5.5"])
def test_smoothing_that_is_no_share_is_none(sources: ViewerSources, value: str) -> None:
    assert points(html(sources, f"/charts?run=exp_001&metric=train/loss&smooth={value}"))[1] == "step 2: 0.25"
