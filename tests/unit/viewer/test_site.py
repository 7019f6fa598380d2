import re
from pathlib import Path

import pytest

from nemo_rl.errors import ConfigError, DataError
from nemo_rl.viewer.export import export_group, export_site
from nemo_rl.viewer.viewer_sources import ViewerSources
from tests.unit.viewer.hostile import TEXTS
from tests.unit.viewer.rundirs import failed, rollout, write_run


@pytest.fixture
def sources(tmp_path: Path) -> ViewerSources:
    metrics = [{"step": s, "train/reward": s / 10, "timing/train/total_step_time": 1.0} for s in range(1, 6)]
    train = [rollout(s, group=g, index=i) for s in range(1, 6) for g in "abc" for i in range(2)] + [failed(5, index=9)]
    write_run(tmp_path / "runs" / "exp_001", metrics=metrics, train=train, validation=[rollout(0), rollout(5)])
    opened = ViewerSources.open([tmp_path / "runs"], cache=tmp_path / "cache")
    for source in opened.by_id.values():
        source.complete()
    return opened


def targets(html: str) -> list[str]:
    return re.findall(r'(?:href|src)="([^"]*)"', html)


def test_every_link_of_an_export_is_a_file_of_it(sources: ViewerSources, tmp_path: Path) -> None:
    directory = tmp_path / "out"
    count = export_site(sources, directory)
    files = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    pages = [name for name in files if name.endswith(".html")]
    assert len(pages) == count
    for name in pages:
        for target in targets((directory / name).read_text()):
            assert target.split("#")[0] in {*files, "", "data:,"}, (name, target)
    index = (directory / "index.html").read_text()
    assert "exp_001" in index
    assert "http" not in re.sub(r"http-equiv", "", index)


def test_export_is_bounded_and_covers_all_steps(sources: ViewerSources, tmp_path: Path) -> None:
    assert export_site(sources, tmp_path / "out", max_pages=16) == 16
    text = "".join(path.read_text() for path in (tmp_path / "out").glob("*.html"))
    assert all(f"<h1>Step {step}</h1>" in text for step in range(1, 6))


def test_second_export_replaces_the_first_and_no_other_directory(sources: ViewerSources, tmp_path: Path) -> None:
    export_site(sources, tmp_path / "out", max_pages=3)
    (tmp_path / "out" / "page-old.html").write_text("")
    export_site(sources, tmp_path / "out", max_pages=3)
    assert not (tmp_path / "out" / "page-old.html").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    with pytest.raises(ConfigError, match="holds other files"):
        export_site(sources, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_group_is_one_file_without_links(sources: ViewerSources, tmp_path: Path) -> None:
    path = tmp_path / "group.html"
    export_group(sources, "exp_001", "2:b", 2, path)
    html = path.read_text()
    assert targets(html) == ["#main"]
    assert "<script" not in html
    assert "style-src &#39;sha256-" in html
    assert "answer 2.1" in html
    with pytest.raises(DataError, match="has no such group"):
        export_group(sources, "exp_001", "none", None, path)


def test_hostile_texts_are_text_in_an_export(tmp_path: Path) -> None:
    rows = [rollout(1, group=text[:200], index=i, text=text) for i, text in enumerate(TEXTS)]
    write_run(tmp_path / "runs" / "exp_001", metrics=[{"step": 1, "train/reward": 1.0}], train=rows)
    opened = ViewerSources.open([tmp_path / "runs"], cache=tmp_path / "cache")
    opened.get("exp_001").complete()
    export_site(opened, tmp_path / "out", max_pages=200)
    for path in (tmp_path / "out").glob("*.html"):
        assert not re.search(r"<(?:script(?! src=\"static)|img|iframe|object|embed|base|style|video)", path.read_text())
