"""The whole script of an array task, with a stand-in for srun: which seed and chunk, what ends it, what is left."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.jobs.collection_scripts import aggregation_script, collection_script, format_environment
from tests.fakes.slurm_commands import write_srun
from tests.unit.jobs.slurm.shell import DEADLINE_S
from tests.unit.jobs.slurm.submissions import submission

NODE_SERVER = Path(__file__).parents[3] / "fakes" / "node_server.py"
# `nemo-rl` that writes down how it was called, and then does what the shell lines in AS_PROGRAM say.
PROGRAM = ["bash", "-c", 'echo "$@" >>"$CALLS"; echo "$A" "$B" >>"$VARIABLES"; eval "${AS_PROGRAM:-}"', "-"]


def run_script(text: str, directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    (directory / "script").write_text(text)
    path = f"{write_srun(directory / 'bin')}:{os.environ['PATH']}"
    files = {"CALLS": str(directory / "calls"), "VARIABLES": str(directory / "variables")}
    return subprocess.run(
        ["bash", str(directory / "script")],
        env={"PATH": path, "NEMO_RL_POLL_S": "0.05", "A": "shell", "B": "shell", **files, **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def run_task(directory: Path, task: int, *, seeds: tuple[int, ...] = (0,), environment: str = "", **slurm: Any):
    """The exit code and log of one array task, and what its collections were called with."""
    made = submission(directory, seeds=seeds, program=PROGRAM, **slurm)
    made.directory.mkdir(parents=True)
    for name, component in made.components.items():
        made.environment_file(name).write_text(format_environment(component.environment))
    done = run_script(
        collection_script(made),
        directory,
        AS_PROGRAM=environment,
        SLURM_ARRAY_TASK_ID=str(task),
        SLURM_ARRAY_JOB_ID="7",
        SLURM_JOB_NODELIST="n[1-2]",
    )
    calls = (directory / "calls").read_text().splitlines() if (directory / "calls").exists() else []
    prefix = f"collect --config {made.collect_config} "
    return done, sorted(call.removeprefix(prefix) for call in calls)


def small_server(directory: Path) -> dict[str, Any]:
    return {"command": [sys.executable, str(NODE_SERVER), "{host}:{port}", str(directory)], "start_timeout_s": 120}


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        (0, "collect.seeds=0 collect.chunk=0/4"),
        (3, "collect.seeds=0 collect.chunk=3/4"),
        (6, "collect.seeds=5 collect.chunk=2/4"),
    ],
)
def test_an_array_task_has_one_chunk_of_one_seed(task: int, expected: str, tmp_path: Path) -> None:
    done, calls = run_task(tmp_path, task, seeds=(0, 5), num_chunks=4)
    assert done.returncode == 0, done.stderr
    assert calls == [expected]
    assert f"seed {0 if task < 4 else 5}, chunk {task % 4} of 4, on n[1-2]" in done.stderr


def test_one_chunk_is_the_whole(tmp_path: Path) -> None:
    _, calls = run_task(tmp_path, 1, seeds=(3, 4))
    assert calls == ["collect.seeds=4"]


def test_several_processes_cut_their_tasks_chunk_further(tmp_path: Path) -> None:
    _, calls = run_task(tmp_path, 1, num_chunks=2, nodes=2, collection={"num_tasks": 4})
    assert calls == [f"collect.seeds=0 collect.chunk={i}/8" for i in (4, 5, 6, 7)]


def test_variables_of_a_component_are_its_own(tmp_path: Path) -> None:
    slurm: dict[str, Any] = {"collection": {"environment": {"A": "o'n e"}}, "aggregation": {"environment": {"B": "x"}}}
    run_task(tmp_path, 0, **slurm)
    assert (tmp_path / "variables").read_text() == "o'n e shell\n"
    made = submission(tmp_path, program=PROGRAM, **slurm)
    done = run_script(aggregation_script(made), tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "variables").read_text().splitlines()[1:] == ["shell x", "shell x"]


def test_setup_comes_before_the_steps_and_ends_the_job_where_it_fails(tmp_path: Path) -> None:
    _, calls = run_task(tmp_path, 0, setup="export A=loaded")
    assert calls == ["collect.seeds=0"]
    assert (tmp_path / "variables").read_text() == "loaded shell\n"
    made = submission(tmp_path, program=PROGRAM, setup="false")
    done = run_script(collection_script(made), tmp_path, SLURM_ARRAY_TASK_ID="0", SLURM_ARRAY_JOB_ID="8")
    assert done.returncode != 0
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


def test_a_collection_that_fails_is_the_jobs_exit_code(tmp_path: Path) -> None:
    done, calls = run_task(tmp_path, 0, environment="exit 2", server=small_server(tmp_path))
    assert done.returncode == 2
    assert len(calls) == 1


def test_the_collection_is_told_where_the_server_is(tmp_path: Path) -> None:
    done, (call,) = run_task(tmp_path, 0, server=small_server(tmp_path))
    assert done.returncode == 0, done.stderr
    address, seed = call.split()
    assert address.startswith("server.address=http://127.0.0.1:2")
    assert address.endswith("/v1")
    assert seed == "collect.seeds=0"


def test_a_server_that_dies_under_the_collection_ends_the_job_with_its_log(tmp_path: Path) -> None:
    done, calls = run_task(
        tmp_path, 0, environment=f"touch '{tmp_path}/die-none'; exec sleep 600", server=small_server(tmp_path)
    )
    assert done.returncode == 1
    assert len(calls) == 1
    assert "the server ended while it was needed" in done.stderr
    assert "    no memory left on none" in done.stderr


def test_a_server_that_does_not_start_ends_the_job_before_the_collection(tmp_path: Path) -> None:
    command = ["bash", "-c", "echo out of memory at {port} >&2; exit 3"]
    done, calls = run_task(tmp_path, 0, server={"command": command})
    assert done.returncode == 1
    assert calls == []
    assert "server 0 ended before it was up" in done.stderr
    assert "    out of memory at 2" in done.stderr


@pytest.mark.parametrize(("failing", "expected"), [("merge", ["merge"]), ("profile", ["merge", "profile"])])
def test_the_aggregation_ends_with_its_first_failing_step(failing: str, expected: list[str], tmp_path: Path) -> None:
    made = submission(tmp_path, seeds=(0, 5), program=PROGRAM)
    done = run_script(aggregation_script(made), tmp_path, AS_PROGRAM=f'[[ "$1" != {failing} ]] || exit 4')
    assert done.returncode == 4
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == [f"{name} {tmp_path} --seeds 0,5" for name in expected]


def test_the_aggregation_is_given_its_own_arguments(tmp_path: Path) -> None:
    aggregation = {"allow_partial": True, "profile_args": ["--k", "1,4"]}
    run_script(aggregation_script(submission(tmp_path, program=PROGRAM, aggregation=aggregation)), tmp_path)
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"merge {tmp_path} --seeds 0 --allow-partial",
        f"profile {tmp_path} --seeds 0 --k 1,4",
    ]
