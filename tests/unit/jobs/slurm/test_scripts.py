"""The generated scripts: what bash and shellcheck say of them, and what stands in them."""

import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl.jobs.collection_scripts import (
    Submission,
    aggregation_script,
    collection_script,
    format_environment,
    format_redacted_environment,
)
from nemo_rl.jobs.slurm_config import check_slurm
from tests.unit.jobs.slurm.submissions import EVERYTHING, LAYOUTS, SERVER, submission

SHELLCHECK = shutil.which("shellcheck")
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


def checked(text: str, *command: str) -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{text}"


def directives(text: str) -> list[str]:
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    return [word for line in lines for word in shlex.split(line)]


def steps(text: str) -> dict[str, list[str]]:
    """The settings that are lists of words, by name."""
    found = {}
    for line in text.splitlines():
        name, is_setting, value = line.partition("=(")
        if is_setting and name.isidentifier() and value.endswith(")"):
            found[name] = shlex.split(value[:-1])
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_passes_the_checks_and_is_a_script(name: str) -> None:
    made = submission(**LAYOUTS[name])
    check_slurm(made.slurm)
    for text in (collection_script(made), aggregation_script(made)):
        checked(text, "bash", "-n")
        assert "set -euo pipefail" in text


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("name", LAYOUTS)
def test_shellcheck_finds_nothing_in_the_script_of_every_layout(name: str) -> None:
    assert SHELLCHECK is not None
    made = submission(**LAYOUTS[name])
    for text in (collection_script(made), aggregation_script(made)):
        checked(text, SHELLCHECK, "-")


def test_the_array_is_of_seeds_times_chunks_and_slurm_is_told_what_was_asked() -> None:
    made = submission(Path("/o ut%j"), seeds=(0, 2, 5), **EVERYTHING)
    assert directives(collection_script(made)) == [
        "--job-name=eval-1",
        "--array=0-11%3",
        "--nodes=2",
        "--output=/o ut%%j/slurm/0001/logs/collect-%a.log",
        "--open-mode=append",
        "--requeue",
        "--signal=B:USR1@90",
        "--partition=gpu",
        "--account=me",
        "--qos=high",
        "--time=04:00:00",
        "--gpus-per-node=8",
        "--dependency=afterok:12",
        "--exclusive",
        "--comment=it's #1, isn't it",
    ]
    assert directives(aggregation_script(made)) == [
        "--job-name=eval-1-aggregate",
        "--nodes=1",
        "--ntasks=1",
        "--output=/o ut%%j/slurm/0001/logs/aggregate.log",
        "--open-mode=append",
        "--partition=cpu",
        "--account=me",
        "--qos=high",
        "--time=04:00:00",
    ]


def test_nothing_is_asked_of_slurm_that_was_not_configured() -> None:
    words = directives(collection_script(submission()))
    assert [word.split("=")[0] for word in words] == [
        "--job-name",
        "--array",
        "--nodes",
        "--output",
        "--open-mode",
        "--requeue",
    ]


def test_the_array_has_only_the_tasks_that_are_missing() -> None:
    made = submission(seeds=(0, 1), num_chunks=4)
    some = Submission(**{**{name: getattr(made, name) for name in made.__slots__}, "missing": (0, 1, 2, 5, 7)})
    assert "--array=0-2,5,7" in directives(collection_script(some))


def test_each_component_has_its_container_mounts_directory_and_tasks() -> None:
    found = steps(collection_script(submission(**EVERYTHING)))
    assert found["server_step"] == [
        "srun",
        "--overlap",
        "--overcommit",
        "--kill-on-bad-exit=1",
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--label",
        "--container-image=docker://server:1",
        "--container-mounts=/models:/models:ro,/out:/out",
        "--container-workdir=/work",
        "--container-env=HF_TOKEN",
    ]
    collection = found["collection_step"]
    assert collection[4:7] == ["--nodes=1", "--ntasks=2", "--ntasks-per-node=2"]
    assert "--relative=0" in collection
    assert "--container-image=docker://ours:2" in collection
    assert found["collect_command"] == ["nemo-rl", "collect", "--config", "/out/slurm/0001/collect.yaml"]


def test_outside_of_a_container_steps_run_where_it_was_submitted_with_the_same_python() -> None:
    made = submission(collection={"srun_args": ["--cpu-bind=none"]}, aggregation={"working_directory": "/there"})
    found = steps(collection_script(made))
    assert found["collection_step"][-2:] == ["--chdir=/out", "--cpu-bind=none"]
    assert found["collect_command"][:4] == [made.python, "-m", "nemo_rl", "collect"]
    aggregation = aggregation_script(made)
    assert "--chdir=/there" in aggregation
    assert f"{made.python} -m nemo_rl merge /out --seeds 0)" in aggregation
    assert aggregation.index(" merge ") < aggregation.index(" profile ")


def test_a_mount_of_ones_own_over_the_output_is_enough() -> None:
    made = submission(collection={"container": "image", "mounts": ["/lustre/out:/out"]})
    assert "--container-mounts=/lustre/out:/out" in steps(collection_script(made))["collection_step"]


def test_vllm_is_that_of_this_python_or_of_the_container() -> None:
    own = steps(collection_script(made := submission(server=SERVER)))["server_command"]
    assert own == [str(Path(made.python).with_name("vllm")), "serve", "org/model"]
    within = steps(collection_script(submission(server={**SERVER, "container": "i"})))["server_command"]
    assert within == ["vllm", "serve", "org/model"]


def test_the_job_program_may_be_another() -> None:
    made = submission(program=["uv", "run", "nemo-rl"])
    assert steps(collection_script(made))["collect_command"][:4] == ["uv", "run", "nemo-rl", "collect"]


def test_no_value_of_an_environment_stands_in_a_script() -> None:
    made = submission(**EVERYTHING)
    for text in (collection_script(made), aggregation_script(made)):
        assert "secret" not in text
    assert "/out/slurm/0001/server.env" in collection_script(made)
    assert "/out/slurm/0001/aggregation.env" in aggregation_script(made)


def test_what_is_shown_hides_what_is_named_like_a_secret() -> None:
    variables = {"HF_TOKEN": "abc", "wandb_api_key": "def", "PATH": "/bin", "http_proxy": "http://me:pw@proxy:80"}
    assert format_redacted_environment(variables) == (
        "HF_TOKEN='(hidden)'\nwandb_api_key='(hidden)'\nPATH=/bin\nhttp_proxy='http://(hidden)@proxy:80'\n"
    )


@settings(max_examples=30)
@given(st.dictionaries(st.from_regex(r"X[A-Z_0-9]{0,5}", fullmatch=True), WORDS, max_size=4))
def test_any_environment_reaches_the_processes_as_it_is(variables: dict[str, str]) -> None:
    script = f"set -a\n{format_environment(variables)}set +a\nexec env -0"
    done = subprocess.run(["bash", "-c", script], env={}, stdout=subprocess.PIPE, timeout=120, check=True)
    found = dict(item.split("=", 1) for item in done.stdout.decode().split("\0") if item.startswith("X"))
    assert found == variables


@settings(max_examples=30)
@given(st.lists(WORDS, min_size=1, max_size=4))
def test_any_word_of_a_command_reaches_it_as_it_is(words: list[str]) -> None:
    made = submission(server={"model": "m", "args": words, "container": "c"})
    line = next(line for line in collection_script(made).split("\nserver_command=")[1:])
    value: Any = line[: line.index(")\n\n") + 1]
    script = f"server_command={value}\nprintf '%s\\0' \"${{server_command[@]}}\""
    done = subprocess.run(["bash", "-c", script], stdout=subprocess.PIPE, timeout=120, check=True)
    assert done.stdout.decode().split("\0")[:-1] == ["vllm", "serve", "m", *words]
