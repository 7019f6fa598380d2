"""Five of the user stories in Firefox; skipped where it is not installed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_rl.viewer.export import export_site
from nemo_rl.viewer.viewer_sources import ViewerSources
from tests.browser.firefox import BidiError, Tab, firefox
from tests.browser.served import FIREFOX, served, write_runs
from tests.unit.viewer.rundirs import rollout, write_lines

pytestmark = pytest.mark.skipif(FIREFOX is None, reason="no firefox on this machine")
ENTER = "\ue007"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_runs(tmp_path_factory.mktemp("viewer") / "runs")


@pytest.fixture(scope="module")
def opened(runs: Path) -> Iterator[tuple[Tab, str]]:
    """A tab that has opened the address with the token, and the address without it."""
    assert FIREFOX is not None
    with served(runs, runs.parent / "cache") as address, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(runs.parent))
        try:
            with firefox(FIREFOX, runs.parent / "profile") as tab:
                tab.goto(address)
                yield tab, address.split("/?")[0]
        except BidiError as error:
            if "does not start" not in str(error):
                raise
            pytest.skip(str(error))


@pytest.fixture
def tab(opened: tuple[Tab, str]) -> Iterator[Tab]:
    tab, _ = opened
    tab.errors.clear()
    yield tab
    assert tab.errors == []


@pytest.fixture
def home(opened: tuple[Tab, str]) -> str:
    return opened[1]


def test_find_the_first_failed_rollout_and_its_cause(tab: Tab, home: str) -> None:
    tab.goto(f"{home}/")
    tab.click("main a", "exp_001")
    tab.click("main a", "first failed rollout")
    tab.wait_for("document.querySelector('main').innerText.includes('Traceback (most recent call last)')")
    assert "ToolError: the calculator is out of order" in tab.text()


def test_compare_the_same_prompt_at_two_steps(tab: Tab, home: str) -> None:
    tab.goto(f"{home}/s/exp_001/validation?first=0&second=12&order=better")
    tab.click("a.open")
    tab.wait_for("document.querySelectorAll('section').length >= 2")
    sides = tab.evaluate("[...document.querySelectorAll('section')].map(each => each.innerText)")
    assert "at 0" in sides[0]
    assert "at 12" in sides[1]


def test_read_a_five_turn_tool_conversation(tab: Tab, home: str) -> None:
    tab.goto(f"{home}/s/agent/rollout/train/0.0")
    assert tab.evaluate("document.querySelectorAll('li.turn.assistant').length") == 6
    assert "result 0: 51" in tab.text()
    assert "result 3: 51" not in tab.text()
    tab.click("details#turn12 summary")
    tab.wait_for("document.querySelector('details#turn12').open")
    assert "result 3: 51" in tab.text()
    tab.type("o")
    tab.wait_for("!document.querySelector('main details:not([open])')")
    assert "thought 0" in tab.text()


def test_send_a_filtered_link(tab: Tab, home: str) -> None:
    tab.goto(f"{home}/s/exp_001/rollouts/train")
    tab.type("/The sum at 4 is 2" + ENTER)
    tab.wait_for("location.search.includes('text=')")
    tab.wait_for("document.querySelector('main').innerText.includes('3 found')")
    link, seen = tab.evaluate("location.href"), tab.text()
    tab.goto(f"{home}/")
    tab.goto(link)
    assert tab.text() == seen


def test_follow_a_running_step(tab: Tab, home: str, runs: Path) -> None:
    tab.goto(f"{home}/s/exp_002")
    tab.wait_for("document.getElementById('live').textContent === 'live'")
    metrics = {"step": 99, "train/reward": 0.9, "timing/train/total_step_time": 1}
    write_lines(runs / "exp_002" / "metrics.jsonl", [metrics])
    write_lines(runs / "exp_002" / "rollouts" / "train.jsonl", [rollout(99)])
    tab.wait_for("[...document.querySelectorAll('a.open')].some(each => each.innerText.includes('step 99'))")


def test_export_opens_from_disk_without_a_request(tab: Tab, runs: Path, tmp_path: Path) -> None:
    sources = ViewerSources.open([runs / "exp_001"], cache=tmp_path / "cache")
    sources.get("exp_001").complete()
    export_site(sources, tmp_path / "out", max_pages=60)
    tab.goto((tmp_path / "out" / "index.html").as_uri())
    tab.click("a.open", "exp_001")
    tab.click("a.open", "step 3")
    tab.wait_for("document.querySelector('h1').innerText === 'Step 3'")
    loaded = tab.evaluate("performance.getEntriesByType('resource').map(each => each.name)")
    assert all(url.startswith(("file://", "data:")) for url in loaded)
