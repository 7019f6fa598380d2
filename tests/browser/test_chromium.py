"""What users do with the viewer, in Chromium; skipped where it or Playwright is not installed."""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.durable_files import hold_directory
from nemo_rl.viewer.export import export_group, export_site
from nemo_rl.viewer.viewer_sources import ViewerSources
from tests.browser.served import CHROMIUM, served, write_runs
from tests.support.quick import quick
from tests.unit.viewer.hostile import TEXTS
from tests.unit.viewer.rundirs import rollout, write_lines, write_record

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
WAIT_MS = 60_000
MAIN_PAGES = (
    "/",
    "/s/exp_001",
    "/s/exp_001/step/1",
    "/s/exp_001/group/train?group=1%3Aa&step=1",
    "/s/agent/rollout/train/0.0",
    "/s/exp_001/rollout/train/0.0",
    "/s/exp_001/validation",
    "/s/exp_001/rollouts/train",
    "/s/words",
    "/s/exp_001/check",
    "/charts?run=exp_001&run=exp_002&smooth=0.5",
    "/s/exp_003/groups",
    "/s/exp_003/difference/train?first=0.2&second=0.3",
    "/s/exp_003/rollout/train/0.0?find=boxed",
    "/compare?a=exp_001&b=exp_002",
    "/s/exp_003/timeline",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        try:
            started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=180_000)
        except playwright.Error as error:
            pytest.skip(f"chromium does not start: {str(error).splitlines()[0]}")
        yield started
        started.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_runs(tmp_path_factory.mktemp("viewer") / "runs")


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    with served(runs, runs.parent / "cache") as url:
        yield url


@pytest.fixture(scope="module")
def context(browser: Any, address: str) -> Iterator[Any]:
    opened = browser.new_context(base_url=address.split("/?")[0])
    opened.set_default_timeout(WAIT_MS)
    first = opened.new_page()
    first.goto(address)
    first.close()
    yield opened
    opened.close()


@pytest.fixture
def page(context: Any) -> Iterator[Any]:
    opened = context.new_page()
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    yield opened
    opened.close()
    assert [p for p in problems if "404" not in p] == []


def follow(page: Any, selector: str) -> None:
    """Click, and wait until the page that this may lead to is whole."""
    page.click(selector)
    page.wait_for_load_state("load")


def main_text(page: Any) -> str:
    return page.inner_text("main")


def test_token_leaves_the_address_after_the_first_request(context: Any, address: str) -> None:
    page = context.new_page()
    page.goto(address)
    assert "token" not in page.url
    assert "exp_002" in main_text(page)
    page.close()


def test_stranger_without_the_token_sees_nothing(browser: Any, address: str) -> None:
    stranger = browser.new_context().new_page()
    answer = stranger.goto(address.split("?")[0])
    assert answer.status == 401
    assert "Token needed" in main_text(stranger)
    stranger.context.close()


def test_open_a_run_from_the_list(page: Any) -> None:
    page.goto("/")
    follow(page, "text=exp_001 >> nth=0")
    page.wait_for_url("**/s/exp_001")
    assert page.locator("figure.chart").count() >= 5


def test_reward_curve_leads_to_a_step(page: Any) -> None:
    page.goto("/s/exp_001")
    page.locator('a[aria-label^="train, step 3"]').first.click()
    page.wait_for_load_state("load")
    page.wait_for_url("**/s/exp_001/step/3")
    assert page.inner_text("h1") == "Step 3"


def test_find_the_first_failed_rollout_and_its_cause(page: Any) -> None:
    page.goto("/s/exp_001")
    follow(page, "text=first failed rollout >> nth=0")
    assert "ToolError: the calculator is out of order" in main_text(page)
    assert "Traceback (most recent call last)" in main_text(page)


def test_failures_are_grouped_by_class_and_cause(page: Any) -> None:
    page.goto("/s/exp_001")
    follow(page, "td >> text=environment")
    assert "2 rollouts" in main_text(page)


def test_find_the_longest_truncated_answers(page: Any) -> None:
    page.goto("/s/exp_001")
    follow(page, "text=longest truncated")
    tokens = [int(t) for t in page.locator("tbody tr td:nth-child(5)").all_inner_texts()]
    assert tokens == [902, 901, 900]


def test_compare_the_same_prompt_at_two_steps(page: Any) -> None:
    page.goto("/s/exp_001/validation?first=0&second=12&order=better")
    follow(page, "a.open >> nth=0")
    assert "at 0" in page.locator("section").nth(0).inner_text()
    assert "at 12" in page.locator("section").nth(1).inner_text()


def test_choose_other_validation_steps(page: Any) -> None:
    page.goto("/s/exp_001/validation")
    page.select_option("select[name=first]", "12")
    follow(page, "button:has-text('Compare')")
    assert page.inner_text("h1") == "Validation: step 12 and step 12"


def test_read_a_five_turn_tool_conversation(page: Any) -> None:
    page.goto("/s/agent/rollout/train/0.0")
    assert page.locator("li.turn.assistant").count() == 6
    assert "question of turn 0" in main_text(page)
    assert "The answer is 51." in main_text(page)
    assert "result 0: 51" in main_text(page)
    assert "result 3: 51" not in main_text(page)
    follow(page, "details#turn12 summary")
    assert "result 3: 51" in main_text(page)


def test_thinking_is_folded_and_unfolds(page: Any) -> None:
    page.goto("/s/agent/rollout/train/0.0")
    assert "thought 0" not in main_text(page)
    follow(page, "summary:has-text('thinking') >> nth=0")
    assert "thought 0" in main_text(page)


def test_tool_calls_show_their_arguments(page: Any) -> None:
    page.goto("/s/agent/rollout/train/0.0")
    follow(page, "details.call summary >> nth=0")
    assert "17 * 3" in main_text(page)


def test_one_key_unfolds_everything(page: Any) -> None:
    page.goto("/s/agent/rollout/train/0.0")
    page.keyboard.press("o")
    assert page.locator("main details:not([open])").count() == 0


def test_histories_of_an_agent_are_a_tree(page: Any) -> None:
    page.goto("/s/agent/rollout/train/0.0")
    assert "history 2: 4 messages, the first 4 shared with history 1" in main_text(page)
    follow(page, "text=history 3")
    assert page.locator("li.turn").count() == 2


def test_filter_by_text(page: Any) -> None:
    page.goto("/s/exp_001/rollouts/train")
    page.fill("input[name=text]", "The sum at 4 is 2")
    page.keyboard.press("Enter")
    page.wait_for_url("**text=*")
    assert "3 found" in main_text(page)


def test_filtered_view_is_a_link(page: Any, context: Any) -> None:
    page.goto("/s/exp_001/rollouts/train")
    page.fill("input[name=min_reward]", "1")
    page.fill("input[name=step]", "2")
    follow(page, "button:has-text('Filter')")
    page.wait_for_url("**min_reward=1*")
    other = context.new_page()
    other.goto(page.url)
    assert main_text(other) == main_text(page)
    assert "6 rollouts" in main_text(other)
    other.close()


def test_clear_the_filters(page: Any) -> None:
    page.goto("/s/exp_001/rollouts/train?failure=any")
    follow(page, "text=clear")
    assert "149 rollouts" in main_text(page)


def test_turn_the_page_of_a_list(page: Any) -> None:
    page.goto("/s/exp_001/rollouts/train")
    follow(page, "text=next page")
    assert "from 50 on" in main_text(page)


def test_rollouts_of_a_group_side_by_side(page: Any) -> None:
    page.goto("/s/exp_001/step/1")
    follow(page, "a.open >> nth=0")
    assert page.locator(".card").count() == 4
    assert "0.7" in page.locator(".card").first.inner_text()


def test_walk_through_the_steps(page: Any) -> None:
    page.goto("/s/exp_001/step/1")
    page.keyboard.press("]")
    page.wait_for_url("**/step/2")
    page.keyboard.press("[")
    page.wait_for_url("**/step/1")


def test_tokens_are_coloured_by_logprob(page: Any) -> None:
    page.goto("/s/exp_001/rollout/train/0.0")
    kinds = page.locator(".tokens span").evaluate_all("all => all.map(each => each.className)")
    assert kinds == ["context", "context", "t0", "t5", "t0"]
    assert "advantage 0.7" in page.locator(".tokens span").nth(3).get_attribute("title")


def test_tokens_by_advantage_and_mask(page: Any) -> None:
    page.goto("/s/exp_001/rollout/train/0.0")
    follow(page, "a:text-is('advantage')")
    assert page.locator(".tokens .p2").count() == 3
    follow(page, "a:text-is('mask')")
    assert page.locator(".tokens .sampled").count() == 3


def test_collection_by_task_with_pass_at_k(page: Any) -> None:
    page.goto("/s/words")
    assert "pass@4" in main_text(page)
    follow(page, "text=hardest first")
    assert page.locator("table.rows tbody a").first.inner_text() == "task 0"
    follow(page, "table.rows tbody a >> nth=0")
    assert page.locator(".card").count() == 4


def test_compare_two_runs(page: Any) -> None:
    page.goto("/compare?a=exp_001&b=exp_002")
    assert "policy.lr" in main_text(page)
    assert page.locator("tr:has-text('train/reward') >> text=0.2").count() >= 1


def test_check_of_a_run(page: Any) -> None:
    page.goto("/s/exp_001")
    follow(page, "text=check")
    assert "failures environment" in main_text(page)


def test_keyboard_alone_reaches_a_rollout(page: Any) -> None:
    page.goto("/s/exp_001/rollouts/train")
    for key in ("j", "j", "k", "Enter"):
        page.keyboard.press(key)
    page.wait_for_url("**/rollout/train/0.0")
    page.keyboard.press("u")
    page.wait_for_url("**/group/**")


def test_slash_moves_to_the_search(page: Any) -> None:
    page.goto("/s/exp_001/rollouts/train")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.name") == "text"


def test_help_lists_the_keys(page: Any) -> None:
    page.goto("/")
    page.keyboard.press("?")
    assert page.locator("dialog[open] kbd").count() >= 8
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0


def test_dark_mode_is_remembered(page: Any) -> None:
    page.goto("/")
    page.keyboard.press("d")
    theme = page.evaluate("document.documentElement.dataset.theme")
    page.goto("/s/exp_001")
    assert page.evaluate("document.documentElement.dataset.theme") == theme == "dark"
    page.evaluate("localStorage.clear()")


def test_follow_a_running_step(page: Any, runs: Path) -> None:
    page.goto("/s/exp_002")
    page.wait_for_selector("#live:text-is('live')")
    follow(page, "details#config summary")
    metrics = {"step": 99, "train/reward": 0.9, "timing/train/total_step_time": 1}
    write_lines(runs / "exp_002" / "metrics.jsonl", [metrics])
    write_lines(runs / "exp_002" / "rollouts" / "train.jsonl", [rollout(99)])
    page.wait_for_selector("a.open:has-text('step 99')")
    assert page.locator("details#config[open]").count() == 1


def test_the_list_of_rollouts_follows_a_running_step_until_a_filter_is_chosen(page: Any, runs: Path) -> None:
    train = runs / "exp_002" / "rollouts" / "train.jsonl"
    page.goto("/s/exp_002/rollouts/train")
    page.wait_for_selector("#live:text-is('live')")
    shown = int(page.inner_text("main p[role=status]").split()[0])
    write_lines(train, [rollout(100)])
    page.wait_for_selector(f"text={shown + 1} rollouts")
    page.select_option("select[name=sort]", "-reward")
    with page.expect_response(lambda answer: answer.url.endswith("/s/exp_002/rollouts/train")) as answer:
        write_lines(train, [rollout(101)])
    assert f"{shown + 2} rollouts" in answer.value.text()
    page.evaluate("() => new Promise((done) => setTimeout(done))")  # after what the answer leads to
    assert page.input_value("select[name=sort]") == "-reward"
    assert f"{shown + 1} rollouts" in main_text(page)


def test_million_tokens_stay_usable(page: Any, runs: Path) -> None:
    write_lines(runs / "agent" / "rollouts" / "train.jsonl", [rollout(1, group="long", text="token " * 1_000_000)])
    page.goto("/s/agent")
    page.goto("/s/agent/rollouts/train")
    page.wait_for_selector("text=2 rollouts")
    follow(page, "a.open >> nth=1")
    follow(page, "text=all 6,000,000 characters")
    follow(page, "text=later")
    assert "100,000 to 200,000" in main_text(page)


def test_wrong_address_is_a_clear_page(page: Any) -> None:
    assert page.goto("/s/nothing").status == 404
    assert "there is no run or collection 'nothing'" in main_text(page)


def test_export_opens_from_disk_without_a_request(browser: Any, runs: Path, tmp_path: Path) -> None:
    sources = ViewerSources.open([runs / "exp_001", runs / "agent"], cache=tmp_path / "cache")
    for source in sources.by_id.values():
        source.complete()
    export_site(sources, tmp_path / "out", max_pages=150)
    page = browser.new_context().new_page()
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto((tmp_path / "out" / "index.html").as_uri())
    follow(page, "a.open:has-text('exp_001')")
    follow(page, "a.open:has-text('step 3')")
    page.wait_for_selector("h1:has-text('Step 3')")
    follow(page, "a.open >> nth=0")
    page.wait_for_selector(".card")
    assert page.locator(".card").count() == 4
    assert requests
    assert all(url.startswith(("file://", "data:")) for url in requests)
    page.context.close()


def test_group_as_one_file(browser: Any, runs: Path, tmp_path: Path) -> None:
    sources = ViewerSources.open([runs / "exp_001"], cache=tmp_path / "cache")
    sources.get("exp_001").complete()
    export_group(sources, "exp_001", "1:a", 1, tmp_path / "group.html")
    page = browser.new_context().new_page()
    page.goto((tmp_path / "group.html").as_uri())
    assert page.locator(".card").count() == 4
    assert page.evaluate("getComputedStyle(document.querySelector('.card')).borderTopStyle") == "solid"
    page.context.close()


def test_why_did_this_run_end(page: Any) -> None:
    page.goto("/")
    page.select_option("select[name=state]", "failed")
    follow(page, "button:has-text('Filter')")
    assert page.locator("table.rows tbody tr").count() == 1
    assert "OutOfMemoryError" in page.inner_text("tr.dead")
    follow(page, "a:text-is('long answers')")
    assert "Failed after step 2." in main_text(page)
    assert page.inner_text("pre.bad") == "OutOfMemoryError: CUDA out of memory"


def test_follow_a_resumed_run(page: Any, runs: Path) -> None:
    run = runs / "exp_004"
    before = json.loads((run / "run.json").read_text())
    page.goto("/s/exp_004")
    page.wait_for_selector("#live:text-is('live')")
    assert "Failed" in main_text(page)
    with hold_directory(run, key="run"):
        start = {"state": "running", "ended_at": None, "host": socket.gethostname()}
        write_record(run, *before["starts"], start, name="long answers")
        write_lines(run / "metrics.jsonl", [{"step": 3, "train/reward": 0.9, "timing/train/total_step_time": 1}])
        page.wait_for_selector("a.open:has-text('step 3')")
        page.wait_for_selector("strong:has-text('Running.')")
        assert "started 2 times" in main_text(page)
        assert "OutOfMemoryError" in page.inner_text("#starts")
    page.wait_for_selector("strong:has-text('Died after step 3')")
    (run / "run.json").write_text(json.dumps(before))


def test_sort_the_runs(page: Any) -> None:
    page.goto("/")
    follow(page, "th a:text-is('name')")
    names = page.locator("table.rows tbody a.open").all_inner_texts()
    assert names == sorted(names)
    follow(page, "th a:text-is('name')")
    assert page.locator("table.rows tbody a.open").all_inner_texts() == names[::-1]


def test_compare_the_curves_of_three_runs(page: Any) -> None:
    page.goto("/charts?run=exp_001&metric=train/*")
    follow(page, "summary:has-text('more runs')")
    for name in ("exp_002", "exp_003"):
        page.check(f"input[value={name}]")
    page.fill("input[name=metric]", "train/reward")
    page.fill("input[name=smooth]", "0.5")
    page.keyboard.press("Enter")
    page.wait_for_url("**run=exp_003**")
    assert sorted(page.locator(".legend li").all_inner_texts()) == ["exp_001", "exp_002", "exp_003"]
    chart = page.locator("svg[data-points]").bounding_box()
    page.mouse.move(chart["x"] + 2, chart["y"] + chart["height"] / 2)
    values = page.inner_text(".chart output").removeprefix("step 1: ").split(", ")
    assert sorted(values) == ["exp_001 0.05", "exp_002 0.25", "exp_003 0.45"]
    page.mouse.move(chart["x"] + chart["width"] / 2, chart["y"] + 50)
    page.mouse.down()
    page.mouse.move(chart["x"] + chart["width"], chart["y"] + 60)
    page.mouse.up()
    page.wait_for_url(re.compile(r"to=\d"))
    first, last = (int(page.input_value(f"input[name={name}]")) for name in ("from", "to"))
    assert 0.4 * last < first < 0.6 * last
    page.dblclick("svg[data-points]", position={"x": 200, "y": 5})
    page.wait_for_url(lambda url: "to=" not in url)
    assert page.locator(".legend li").count() == 3


def test_find_the_groups_that_are_all_wrong(page: Any) -> None:
    page.goto("/s/exp_003")
    follow(page, "a:text-is('groups')")
    follow(page, "a:text-is('3 all wrong')")
    assert page.locator("table.rows tbody a").all_inner_texts() == ["3:hard", "2:hard", "1:hard"]
    follow(page, "table.rows tbody a >> nth=0")
    assert "all wrong" in main_text(page)
    assert page.locator(".card").count() == 2


def test_read_a_rollout_beside_its_target(page: Any) -> None:
    page.goto("/s/exp_003/rollouts/train?min_reward=0&max_reward=0.5")
    assert "42" in page.locator("table.rows tbody tr").first.inner_text()
    follow(page, "a.open >> nth=0")
    verdict = page.inner_text("[aria-label=Verdict]").split()
    assert verdict == ["reward", "0", "wrong", "expected", "42", "answer", "40"]
    assert page.inner_text(".turn.assistant strong") == "**hard**"
    page.fill("input[name=find]", "BOXED")
    page.keyboard.press("Enter")
    page.wait_for_url("**find=BOXED**")
    assert page.inner_text("mark") == "boxed"


def test_two_rollouts_of_a_group_with_their_difference(page: Any) -> None:
    page.goto("/s/exp_003/group/train?group=1%3Afair&step=1")
    follow(page, "text=best and worst side by side")
    assert page.locator("mark").all_inner_texts() == ["42", "40"]


def test_zoom_into_the_timeline_of_a_step(page: Any) -> None:
    page.goto("/s/exp_003")
    follow(page, "text=timeline")
    assert "Timeline of step 3" in main_text(page)
    assert "trainer busy" in page.inner_text("table.bubbles")
    whole = page.locator(".timeline rect.fill[x]").count()
    box = page.locator("figure.timeline > svg").bounding_box()
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.7, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, middle, steps=4)
    page.mouse.up()
    page.wait_for_url(re.compile(r"timeline\?step=3&from=\d+&to=\d+"))
    assert 0 < page.locator(".timeline rect.fill[x]").count() < whole
    assert "policy_training" in page.inner_text(".timeline")
    follow(page, "text=the whole step")
    assert page.locator(".timeline rect.fill[x]").count() == whole


def test_fifty_hostile_texts_execute_nothing(page: Any) -> None:
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: dialogs.append(dialog.message))
    foreign: list[str] = []
    page.on("request", lambda request: foreign.append(request.url) if "127.0.0.1" not in request.url else None)
    paths = [
        "/s/hostile",
        "/s/hostile/groups",
        "/s/hostile/difference/train?first=0.0&second=0.1",
        "/s/hostile/step/1",
        "/s/hostile/rollouts/train",
        "/s/hostile/check",
    ]
    for path in [*paths, *(f"/s/hostile/rollout/train/0.{row}" for row in range(len(TEXTS)))]:
        assert page.goto(path).status == 200
        assert page.evaluate("document.body.dataset.pwned") is None, path
        assert page.evaluate("document.querySelector('main + dialog + *')") is None, path
        assert page.locator("h1").is_visible(), path
    assert dialogs == []
    assert [url for url in foreign if not url.startswith("data:")] == []


@pytest.mark.parametrize("scheme", quick(["light", "dark"], ["light"]))
def test_axe_finds_no_serious_violation(context: Any, browser: Any, address: str, scheme: str) -> None:
    axe = pytest.importorskip("axe_core_python.sync_playwright", reason="axe-core-python is not installed").Axe()
    themed = browser.new_context(base_url=address.split("/?")[0], color_scheme=scheme, bypass_csp=True)
    page = themed.new_page()
    page.goto(address)
    violations = []
    for path in MAIN_PAGES:
        page.goto(path)
        violations += [
            (path, each["id"], each["impact"], [node["html"][:200] for node in each["nodes"][:2]])
            for each in axe.run(page)["violations"]
            if each["impact"] in ("serious", "critical")
        ]
    themed.close()
    assert violations == []


def test_pages_fit_a_narrow_window(page: Any) -> None:
    page.set_viewport_size({"width": 400, "height": 700})
    for path in MAIN_PAGES:
        page.goto(path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400, path


def test_policy_forbids_inline_script(context: Any) -> None:
    page = context.new_page()
    answer = page.goto("/s/exp_001")
    assert re.search(r"script-src 'self';", answer.headers["content-security-policy"])
    page.evaluate(
        """() => {
            const each = document.createElement("script");
            each.textContent = "document.body.dataset.pwned = '1'";
            document.body.append(each);
        }"""
    )
    assert page.evaluate("document.body.dataset.pwned") is None
    page.close()
