"""Gym as it is installed, without its code."""

from pathlib import Path

import pytest

from nemo_rl.environments.nemo_gym.configuration import POLICY_MODEL_CONFIG

MATH = "resources_servers/math/configs/math.yaml"


@pytest.fixture
def site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gym as it is installed, and an empty current directory."""
    root = tmp_path / "site-packages"
    files = {
        MATH: "math: {resources_servers: {math: {entrypoint: app.py}}}",
        POLICY_MODEL_CONFIG: "policy_model: {responses_api_models: {vllm_model: "
        "{entrypoint: app.py, return_token_id_information: true}}}",
        "resources_servers/math/requirements.txt": "-e nemo-gym[dev] @ ../../\n# why\nmath-verify==0.8.0 # pinned\n\n",
        "environment_servers/legacy_agent/requirements.txt": "-e nemo-gym[dev] @ ../../\n",
        "responses_api_models/vllm_model/pyproject.toml": '[project]\ndependencies = ["nemo-gym[dev]", "tiktoken"]\n',
        "resources_servers/other/requirements.txt": "torch\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return root
