"""The timeline: bars where the spans were, the part that an address names, and the bubble table beside it."""

import re
from pathlib import Path

import pytest

from nemo_rl.errors import DataError
from nemo_rl.viewer import timeline_page
from nemo_rl.viewer.charts import LARGE, LEFT, RIGHT
from nemo_rl.viewer.site import Renderer, find_page
from nemo_rl.viewer.viewer_sources import ViewerSources
from tests.unit.viewer.hostile import TEXTS
from tests.unit.viewer.rundirs import write_run
from tests.unit.viewer.traced import write_trace

WIDTH = LARGE[0] - LEFT - RIGHT


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_trace(write_run(tmp_path / "runs" / "exp_001"))
    write_run(tmp_path / "runs" / "exp_002")
    return tmp_path / "runs"


def render(runs: Path, address: str) -> str:
    sources = ViewerSources.open([runs], cache=runs.parent / "cache")
    for source in sources.by_id.values():
        source.complete()
    return Renderer().page(find_page(sources, address))


def bars(html: str) -> list[tuple[float, float, str]]:
    """Return the left edge, the width and the first line of the description of each bar."""
    pattern = r'<rect class="fill c\d" x="([\d.]+)" y="\d+" width="([\d.]+)" height="\d+"><title>([^<\n]*)'
    return [(float(x), float(width), title) for x, width, title in re.findall(pattern, html)]


def test_bars_stand_where_the_spans_were(runs: Path) -> None:
    html = render(runs, "/s/exp_001/timeline?step=2")
    assert "Timeline of step 2" in html
    found = {title: (x, width) for x, width, title in bars(html)}
    assert found["policy_training, 300 ms"] == pytest.approx((LEFT + 0.6 * WIDTH, 0.3 * WIDTH), abs=0.02)
    assert found["rollout, 500 ms"] == pytest.approx((LEFT, 0.5 * WIDTH), abs=0.02)
    assert found["decode, 450 ms"] == pytest.approx((LEFT + 0.05 * WIDTH, 0.45 * WIDTH), abs=0.02)
    tracks = re.findall(r'<text class="tick" x="52" y="\d+">([^<]+)', html)
    assert tracks == ["driver", "policy rank 0", "engines", "rollouts"]


def test_a_part_of_a_step_is_drawn_in_full_width(runs: Path) -> None:
    found = bars(render(runs, "/s/exp_001/timeline?step=2&from=600000&to=900000"))
    assert {title for _, _, title in found} == {
        "total_step_time, 1 s",
        "policy_training, 300 ms",
        "train_step, 290 ms",
    }
    assert all(x >= LEFT and x + width <= LEFT + WIDTH + 0.02 for x, width, _ in found)


def test_the_table_beside_it_is_that_of_the_command(runs: Path) -> None:
    text = re.sub(r"<[^>]+>", " ", render(runs, "/s/exp_001/timeline"))
    assert re.search(r"trainer busy\s+0\.3\s+30\.0%", text)
    assert re.search(r"waits: generation\s+0\.\d+", text)
    assert "grpo.async_grpo.enabled: true" in text


def test_the_run_leads_to_its_timeline_if_it_was_traced(runs: Path) -> None:
    assert "/s/exp_001/timeline" in render(runs, "/s/exp_001")
    assert "timeline" not in render(runs, "/s/exp_002")


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("/s/exp_002/timeline", "start runs with logger.trace.enabled=true"),
        ("/s/exp_001/timeline?step=9", "has no step 9; it has 1 to 3"),
    ],
)
def test_what_is_not_there_is_named(runs: Path, address: str, problem: str) -> None:
    with pytest.raises(DataError, match=re.escape(problem)):
        render(runs, address)


@pytest.mark.parametrize("window", ["from=x&to=-1", "from=99999999999&to=1", "from=5&to=5", "from=&to="])
def test_windows_that_are_none_still_give_a_page(runs: Path, window: str) -> None:
    assert "total_step_time" in render(runs, f"/s/exp_001/timeline?step=1&{window}")


def test_a_large_trace_is_left_to_perfetto(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_page, "MAX_TRACE_BYTES", 100)
    with pytest.raises(DataError, match=r"open it at https://ui\.perfetto\.dev"):
        render(runs, "/s/exp_001/timeline")


def test_names_in_a_trace_are_text(tmp_path: Path) -> None:
    for i, text in enumerate(TEXTS[:12]):
        run = write_run(tmp_path / "runs" / f"exp_{i}")
        write_trace(run, num_steps=1, num_rollouts=1, env=text)
        html = render(tmp_path / "runs", f"/s/exp_{i}/timeline")
        assert text not in html


def test_many_short_spans_of_a_lane_are_few_bars(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "exp_001")
    write_trace(run, num_steps=1, num_rollouts=2000)
    html = render(tmp_path / "runs", "/s/exp_001/timeline")
    assert f"rollouts ({2000 - timeline_page.MAX_LANES} more lanes)" in html
    assert len(bars(html)) <= 5 * timeline_page.MAX_LANES + 10
