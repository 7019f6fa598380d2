"""Rows of files."""

from pathlib import Path

from nemo_rl.config.data import DatasetConfig
from nemo_rl.data.row_sources import load_rows


def test_a_csv_file_is_read_by_its_header(tmp_path: Path) -> None:
    (tmp_path / "math.csv").write_text('Question,Answer\n"1, 2 and?",3\n')
    section = DatasetConfig(dataset_name="csv", data_path=str(tmp_path / "math.csv"))
    assert list(load_rows(section, seed=0, key="data.input")) == [{"Question": "1, 2 and?", "Answer": 3}]
    (tmp_path / "mmlu.csv").write_text("Question,A,B,C,D,Answer,Subject\nWhich?,a,b,c,d,C,letters\n")
    section = DatasetConfig(dataset_name="mmlu_csv", data_path=str(tmp_path / "mmlu.csv"))
    expected = {"input": "Which?\n\nA) a\nB) b\nC) c\nD) d", "output": "C"}
    assert list(load_rows(section, seed=0, key="data.input")) == [expected]
