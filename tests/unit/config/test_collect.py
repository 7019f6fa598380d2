"""What `nemo-rl collect` accepts: seeds and chunks as text, and a server's or an engine's options, never both."""

from pathlib import Path
from typing import Any

import pytest

from nemo_rl.config.collect import CollectRunConfig, parse_chunk, parse_seeds
from nemo_rl.config.loading import load_collect_config, resolved_yaml
from nemo_rl.config.policy import SamplingConfig
from nemo_rl.config.registries import ENGINES
from nemo_rl.config.server import ServerConfig
from nemo_rl.errors import ConfigError

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "examples" / "configs" / "collect.yaml"
RECIPES = [QUICKSTART, *sorted((ROOT / "examples" / "configs").glob("collect*.yaml"))]


@pytest.fixture(autouse=True)
def _start_in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def load(*overrides: str) -> CollectRunConfig:
    return load_collect_config(QUICKSTART, overrides)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
@pytest.mark.parametrize("override", ["collect.num_repeats=2", "server.trust_remote_code=true"])
def test_a_resolved_recipe_is_the_same_configuration(path: Path, override: str, tmp_path: Path) -> None:
    config = load_collect_config(path, [override])
    written = tmp_path / "config.yaml"
    written.write_text(resolved_yaml(config))
    assert load_collect_config(written) == config


def test_a_resolved_recipe_with_an_address_is_the_same_configuration(tmp_path: Path) -> None:
    config = load("server.address=http://127.0.0.1:8000", "server.api=chat", "server.model=m")
    written = tmp_path / "config.yaml"
    written.write_text(resolved_yaml(config))
    assert load_collect_config(written) == config
    assert config.server.addresses == ("http://127.0.0.1:8000",)


def test_seeds_are_written_as_numbers_ranges_and_lists() -> None:
    assert parse_seeds("0,2,5..7") == (0, 2, 5, 6, 7)
    assert load("collect.seeds=0,2,5..7").collect.all_seeds == (0, 2, 5, 6, 7)
    assert load("collect.seeds='3..4'").collect.all_seeds == (3, 4)
    assert load("collect.seeds=[4,1]").collect.all_seeds == (4, 1)
    assert load("collect.seeds=9").collect.all_seeds == (9,)
    assert load().seed == 0


def test_a_chunk_is_its_index_and_how_many_there_are() -> None:
    assert parse_chunk("0/4") == (0, 4)
    assert load("collect.chunk=2/4").collect.chunk_index_and_count == (2, 4)
    assert load().collect.chunk_index_and_count is None


def make_engine(server: ServerConfig, **sampling: Any) -> Any:
    section: Any = ENGINES.section(server.backend)
    return section.from_server(server, SamplingConfig(**sampling))


def test_nothing_is_trusted_unless_it_is_said() -> None:
    engines = [make_engine(ServerConfig(trust_remote_code=on)) for on in (False, True)]
    assert "trust_remote_code" not in engines[0].vllm_kwargs
    assert engines[1].vllm_kwargs == {"trust_remote_code": True}


def test_data_parallelism_is_the_engines_own_option() -> None:
    engine = make_engine(ServerConfig(data_parallel_size=4, vllm_kwargs={"seed": 1}), temperature=0.5)
    assert engine.vllm_kwargs == {"data_parallel_size": 4, "seed": 1}
    assert (engine.temperature, engine.vllm_cfg.enable_sleep_mode) == (0.5, False)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["server.adress=x"], "server.adress = 'x': unknown key; did you mean server.address?"),
        (["collect.num_repeat=2"], "did you mean collect.num_repeats?"),
        (["policy.optimizer.name=x"], "policy.optimizer = .*unknown key"),
        (["server.address=http://a", "server.tensor_parallel_size=1"], "server.tensor_parallel_size = 1: is of an"),
        (["server.address=http://a", "server.trust_remote_code=false"], "server.trust_remote_code = False: is of an"),
        (["server.model=m"], "server.model = 'm': is of a server that runs already: set server.address"),
        (["server.address=localhost"], "must begin with http"),
        (["server.address=[]"], "must name a server"),
        (["server.backend=hf", "server.data_parallel_size=2"], "server.data_parallel_size = 2: the hf backend"),
        (["server.max_model_len=8"], "server.max_model_len = 8: must be at least policy.max_total"),
        (["collect.seeds=1,x"], "collect.seeds = '1,x': '1,x': seeds look like 0,2,5..7"),
        (["collect.seeds=5..3"], "from a seed to one that is not smaller"),
        (["collect.seeds=[1,1]"], "each once"),
        (["collect.chunk=4/4"], "collect.chunk = '4/4': '4/4': of 4 chunks the indices are 0 to 3"),
        (["collect.chunk=half"], "a chunk looks like 0/4"),
        (["collect.max_attempts=255"], "collect.max_attempts"),
        (["logger.wandb_enabled=true"], "logger.wandb_enabled"),
        (["data.input=[]"], "data.input = .*must name a dataset"),
    ],
)
def test_what_cannot_run_is_refused_with_its_key(overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load(*overrides)
