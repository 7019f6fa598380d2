"""The notebook of the documentation runs from its first cell to its last."""

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "tutorials" / "first_steps.ipynb"

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")


@pytest.mark.slow  # test_python_interface.py and tests/unit/test_api.py have what its cells call
@pytest.mark.filterwarnings("ignore")  # of Jupyter's own libraries
def test_every_cell_of_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(notebook, timeout=520, startup_timeout=300, resources=resources)
    client.execute()  # raises CellExecutionError with the cell and its traceback
    assert "did you mean grpo.num_prompts_per_step?" in str(notebook.cells)
