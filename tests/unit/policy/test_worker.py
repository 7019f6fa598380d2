"""Workers: the operations that they count, and the kind of backends: by name, by dotted path, or by what is enabled."""

from typing import Any

import pytest

from nemo_rl.config.policy import PolicyConfig, TeacherConfig, check_backend
from nemo_rl.errors import ConfigError
from nemo_rl.policy.megatron.backend import MegatronConfig
from nemo_rl.policy.worker import make_policy_worker, make_teacher_worker

HERE = "tests.unit.policy.test_worker"


class OwnWorker:
    """A user's worker: a class of another package."""

    def __init__(self, config: Any, **arguments: Any) -> None:
        self.config = config
        self.arguments = arguments


def policy(**keys: Any) -> PolicyConfig:
    return PolicyConfig.model_validate({"model_name": "m", **keys})


@pytest.mark.parametrize(
    ("keys", "title", "needs_own_process"),
    [
        ({}, "FSDP2", False),
        ({"megatron_cfg": {"enabled": True}}, "Megatron", True),
        ({"backend": "megatron"}, "Megatron", True),
        ({"backend": "fsdp2", "megatron_cfg": {"enabled": True}}, "FSDP2", False),
    ],
)
def test_backend_is_the_one_named_or_enabled(keys: dict[str, Any], title: str, needs_own_process: bool) -> None:
    for model in (policy(**keys), TeacherConfig.model_validate({"model_name": "m", **keys})):
        assert model.parallelism.title == title
        assert needs_own_process == model.parallelism.NEEDS_OWN_PROCESS


def test_sizes_are_those_of_the_chosen_section() -> None:
    sizes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3, "data_parallel_size": 4}
    model = policy(megatron_cfg=sizes, dtensor_cfg={"tensor_parallel_size": 5}, backend="megatron")
    assert (model.model_parallel_size, model.data_parallel_size) == (6, 4)
    assert model.section_of(MegatronConfig).num_pipeline_stages == 3
    assert model.model_copy(update={"backend": "fsdp2"}).model_parallel_size == 5


def test_worker_class_of_ones_own_is_named_by_dotted_path() -> None:
    model = policy(backend=f"{HERE}:OwnWorker", backend_cfg={"data_parallel_size": 2, "kwargs": {"level": 3}})
    check_backend(model, key="policy")
    assert (model.data_parallel_size, model.backend_key) == (2, "backend_cfg")
    worker: Any = make_policy_worker(model, model_path="m")
    assert isinstance(worker, OwnWorker)
    assert worker.arguments == {"model_path": "m", "level": 3}
    teacher = TeacherConfig.model_validate({"model_name": "m", "backend": f"{HERE}.OwnWorker"})
    scorer: Any = make_teacher_worker(teacher, section="teacher", model_path="m")
    assert scorer.arguments == {"section": "teacher", "model_path": "m"}


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"backend": "megatorn"}, r"policy\.backend = 'megatorn': unknown policy backend.*megatron"),
        ({"backend": "nowhere.at:ALL"}, r"policy\.backend = 'nowhere.at:ALL': module 'nowhere.at' cannot be imported"),
        ({"backend_cfg": {"kwargs": {}}}, r"policy\.backend_cfg = .*is a dotted path; it is auto"),
        ({"backend": f"{HERE}:OwnWorker", "backend_cfg": {"levle": 1}}, r"policy\.backend_cfg\.levle = 1"),
        ({"backend": f"{HERE}:HERE"}, "is neither an Entry nor a worker class"),
    ],
)
def test_unknown_backend_or_option_is_refused_with_its_key(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_backend(policy(**keys), key="policy")


def test_hidden_name_of_a_section_is_not_written() -> None:
    dumped = policy().model_dump()
    assert "backend" not in dumped["dtensor_cfg"]
    assert policy(**{name: dumped[name] for name in ("dtensor_cfg", "megatron_cfg")}) == policy()
