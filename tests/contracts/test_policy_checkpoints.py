"""What a policy saves on every layout of ranks: training goes on from it, there and elsewhere, and others read it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from nemo_rl.errors import CheckpointError
from nemo_rl.policy.ranks import RankLayout
from tests.contracts.layouts import FEWER, LENGTHS, Layouts, assert_near, assert_same_metrics
from tests.contracts.policies import SGD, clones, make_policy
from tests.contracts.rank_pool import Mesh, RankPool
from tests.support.quick import quick
from tests.unit.policy.tiny import WeightedNLL, make_batch

pytestmark = pytest.mark.usefixtures("one_thread")


LAST = ("megatron tp 2 pp 2", "bfloat16")
RESUMED = [*((layout, "float32") for layout in FEWER), ("plain", "bfloat16"), LAST]


@pytest.mark.parametrize(
    ("layout", "precision"),
    quick(RESUMED, [("plain", "float32"), ("2 x tp 2", "float32"), ("plain", "bfloat16"), LAST]),
)
def test_training_goes_on_exactly_after_loading(layout: str, precision: str, run: Layouts, tmp_path: Path) -> None:
    """And the save holds what the policy was when it began, whatever was trained while it was written."""
    steps = [("train_step", make_batch(LENGTHS, seed=seed), WeightedNLL()) for seed in range(4)]
    linear = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 3}}
    config: dict[str, Any] = {
        "precision": precision,
        "optimizer_steps": 2,
        "scheduler": [linear, {"name": "torch.optim.lr_scheduler.ConstantLR"}, {"milestones": [3]}],
    }
    save = ("save", tmp_path, {"save_optimizer": True})
    last = [*steps[2:], ("run_with_weights", clones)]
    *metrics, weights = run(layout, "qwen2", *steps[:2], save, *last, **config)[3:]
    *resumed_metrics, resumed = run(layout, "qwen2", ("load", tmp_path), *last, **config)[1:]
    assert [m["lr"] for m in metrics] == pytest.approx([7e-3, 1e-2 / 3])
    assert resumed_metrics == metrics
    assert all(torch.equal(resumed[name], weights[name]) for name in weights)


def load_from(layout: RankLayout, *, path: Path, directories: tuple[Path, Path]) -> str:
    """The error of a policy whose first rank reads another directory than the others, as on a disk that lags."""
    policy = make_policy(layout, path, optimizer=SGD)
    try:
        policy.load(directories[min(layout.rank, 1)])
    except CheckpointError as error:
        return str(error)
    finally:
        policy.close()
    return "none"


def test_optimizer_that_only_one_rank_sees_is_an_error_on_both(
    pool: RankPool, run: Layouts, models: dict[str, Path], tmp_path: Path
) -> None:
    whole, lacking = tmp_path / "whole", tmp_path / "lacking"
    run("2 ranks", "llama", ("save", whole, {"save_optimizer": True}), ("finish_save",), optimizer=SGD)
    shutil.copytree(whole / "weights", lacking / "weights")
    errors = pool.run(Mesh(2), load_from, path=models["llama"], directories=(whole, lacking))
    assert [error.rpartition("optimizer ")[2] for error in errors] == [
        "does not exist for ranks [1]; all ranks must see the same disk"
    ] * 2


MOVES = [
    *[("plain", layout) for layout in FEWER[1:]],
    *[(layout, "plain") for layout in FEWER[1:]],
    ("2 ranks", "4 ranks"),
    ("4 ranks", "tp 2"),
    ("tp 2", "2 x tp 2"),
    ("2 x tp 2", "2 ranks"),
    ("2 ranks", "megatron tp 2"),
    ("megatron tp 2", "megatron pp 2"),
    ("megatron tp 2 pp 2", "2 x tp 2"),
]
QUICK_MOVES = [*MOVES[-7:], ("plain", "4 ranks"), ("megatron dp 2", "plain")]


@pytest.fixture(scope="module")
def checkpoints(run: Layouts, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`checkpoints(layout)`: a directory saved there after a step, and metrics and weights of the step after it."""
    kept: dict[str, tuple[Path, dict[str, float], dict[str, torch.Tensor]]] = {}

    def saved(layout: str) -> tuple[Path, dict[str, float], dict[str, torch.Tensor]]:
        if layout not in kept:
            path = tmp_path_factory.mktemp("saved")
            steps = [("train_step", make_batch(LENGTHS, seed=seed), WeightedNLL()) for seed in range(2)]
            save = ("save", path, {"save_optimizer": True})
            _, _, metrics, weights = run(layout, "qwen3", steps[0], save, steps[1], ("run_with_weights", clones))
            kept[layout] = (path, metrics, weights)
        return kept[layout]

    return saved


@pytest.mark.parametrize(("written_on", "read_on"), quick(MOVES, QUICK_MOVES))
def test_checkpoint_moves_between_layouts(written_on: str, read_on: str, run: Layouts, checkpoints: Any) -> None:
    path, expected_metrics, expected = checkpoints(written_on)
    calls = [("load", path), ("train_step", make_batch(LENGTHS, seed=1), WeightedNLL()), ("run_with_weights", clones)]
    _, metrics, weights = run(read_on, "qwen3", *calls)
    assert_same_metrics(metrics, expected_metrics)
    assert_near(weights, expected, atol=1e-4)  # AdamW divides by what may be near 0


@pytest.mark.parametrize(("written_divided", "read_divided"), [(True, False), (False, True), (True, True)])
def test_checkpoint_moves_to_ranks_that_divide_the_optimizer(
    written_divided: bool, read_divided: bool, run: Layouts, tmp_path: Path
) -> None:
    steps = [("train_step", make_batch(LENGTHS, seed=seed), WeightedNLL()) for seed in range(2)]
    written, read = (
        {"megatron_cfg": {"distributed_data_parallel_config": {"use_distributed_optimizer": is_divided}}}
        for is_divided in (written_divided, read_divided)
    )
    save = ("save", tmp_path, {"save_optimizer": True})
    last = [steps[1], ("run_with_weights", clones)]
    *_, expected_metrics, expected = run(
        "megatron dp 2", "qwen3", steps[0], save, *last, precision="bfloat16", **written
    )
    _, metrics, weights = run("megatron dp 2", "qwen3", ("load", tmp_path), *last, precision="bfloat16", **read)
    assert_same_metrics(metrics, expected_metrics)
    assert_near(weights, expected)


@pytest.mark.parametrize(
    ("layout", "precision"),
    [("plain", "float32"), ("plain", "bfloat16"), ("2 x tp 2", "float32"), ("megatron tp 2 pp 2", "bfloat16")],
)
def test_saved_directory_is_a_hugging_face_model(layout: str, precision: str, run: Layouts, tmp_path: Path) -> None:
    words = WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="[UNK]")
    calls = [
        ("train_step", make_batch(LENGTHS), WeightedNLL()),
        ("save", tmp_path, {"save_optimizer": False}),
        ("run_with_weights", clones),
    ]
    weights = run(layout, "qwen2", *calls, precision=precision, tokenizer=tokenizer)[2]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "weights")
    config = json.loads((tmp_path / "weights" / "config.json").read_text())
    for directory in ("weights", "tokenizer"):
        assert AutoTokenizer.from_pretrained(tmp_path / directory).convert_tokens_to_ids("two") == 2
    assert not (tmp_path / "optimizer").exists()
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["dtype"] == precision
    assert loaded.dtype == getattr(torch, precision)
    assert all(torch.equal(p, weights[n]) for n, p in loaded.named_parameters())


def test_loading_without_optimizer_or_without_anything(run: Layouts, tmp_path: Path) -> None:
    run("plain", "llama", ("save", tmp_path / "weights", {"save_optimizer": False}), ("load", tmp_path / "weights"))
    with pytest.raises(CheckpointError, match=r"cannot be loaded.*nothing"):
        run("plain", "llama", ("load", tmp_path / "nothing"))


def test_checkpoint_of_another_model_is_refused(run: Layouts, tmp_path: Path) -> None:
    run("plain", "llama", ("save", tmp_path, {"save_optimizer": False}))
    with pytest.raises(CheckpointError, match="another model") as error:
        run("plain", "gpt2", ("load", tmp_path))
    assert "policy.model_name" not in str(error.value)  # which may be right


def test_state_of_another_optimizer_is_refused(run: Layouts, tmp_path: Path) -> None:
    run("plain", "llama", ("save", tmp_path, {"save_optimizer": True}), optimizer=SGD)
    with pytest.raises(CheckpointError, match="another optimizer"):
        run("plain", "llama", ("load", tmp_path))


def test_save_that_cannot_be_written_is_an_error(run: Layouts, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot be written"):
        run("plain", "llama", ("save", tmp_path, {"save_optimizer": False}), ("finish_save",))
