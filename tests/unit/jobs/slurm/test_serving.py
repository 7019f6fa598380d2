"""What each server process is started with, in every layout: ports and addresses are found on the node."""

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nemo_rl.jobs.collection_scripts import collection_script
from tests.fakes.slurm_commands import write_srun
from tests.unit.jobs.slurm.shell import DEADLINE_S, run_bash
from tests.unit.jobs.slurm.submissions import SERVER, submission

# A server that writes down how it was started, and goes on.
PROGRAM = [
    sys.executable,
    "-c",
    "import json, os, sys, time; from pathlib import Path\n"
    "directory = Path(os.environ['STARTED']); me = os.environ['SLURM_PROCID']\n"
    "(directory / f'{me}.tmp').write_text(json.dumps([sys.argv[1:], os.environ.get('CUDA_VISIBLE_DEVICES')]))\n"
    "(directory / f'{me}.tmp').rename(directory / f'{me}.json')\n"
    "time.sleep(600)",
]


def started(directory: Path, **slurm: Any) -> list[tuple[dict[str, str | bool], str | None]]:
    """Options and GPUs of each server process, by task."""
    server = {**slurm.pop("server")}
    if "command" not in server:
        server["program"] = PROGRAM
    made = submission(directory, server=server, **slurm)
    made.directory.mkdir(parents=True)
    (directory / "started").mkdir()
    (directory / "script").write_text(collection_script(made).removesuffix("run_task\n") + STARTING)
    assert made.layout is not None
    done = subprocess.run(
        ["bash", str(directory / "script")],
        env={
            "PATH": f"{write_srun(directory / 'bin')}:/usr/local/bin:/usr/bin:/bin",
            "STARTED": str(directory / "started"),
            "NUM_SERVERS": str(made.layout.num_tasks),
            "CUDA_VISIBLE_DEVICES": "0,1,2,3",
        },
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads((directory / "started" / f"{i}.json").read_text()) for i in range(made.layout.num_tasks)]
    return [(options(words), gpus) for words, gpus in rows]


# Instead of the whole task: the servers alone, until all have written down what they are.
STARTING = """
run_dir="$job_dir"
trap end_processes EXIT
wait_for_server() {
    until (($(find "$STARTED" -name '*.json' | wc -l) == NUM_SERVERS)); do
        is_running "$2" || { cat "$3" >&2; exit 1; }
        sleep 0.05
    done
    read -r server_host server_port _ <"$4"
}
start_router() { :; }
collect_command=() watched=()
start_servers
echo "${collect_command[@]}"
"""


def options(words: list[str]) -> dict[str, str | bool]:
    """Example: ["model", "--a", "1", "--b"] is {"": "model", "--a": "1", "--b": True}."""
    found: dict[str, str | bool] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, found[word] = word, True
        else:
            found[name] = word
    return found


def test_one_server_listens_on_the_loopback_address_alone(tmp_path: Path) -> None:
    ((words, gpus),) = started(tmp_path, server={**SERVER, "tensor_parallel_size": 2, "args": ["--seed", "3"]})
    port = words.pop("--port")
    assert words == {"": "org/model", "--tensor-parallel-size": "2", "--seed": "3", "--host": "127.0.0.1"}
    assert 20000 <= int(port) < 25616
    assert gpus == "0,1,2,3"


def test_replicas_of_one_node_are_one_vllm(tmp_path: Path) -> None:
    ((words, _),) = started(tmp_path, server={**SERVER, "num_replicas": 4})
    assert words.keys() == {"", "--data-parallel-size", "--data-parallel-size-local", "--host", "--port"}
    assert (words["--data-parallel-size"], words["--data-parallel-size-local"]) == ("4", "4")


def test_replicas_of_several_nodes_meet_at_the_first(tmp_path: Path) -> None:
    (head, _), (other, _) = started(tmp_path, nodes=2, server={**SERVER, "num_replicas": 6})
    for words in (head, other):
        assert (words["--data-parallel-size"], words["--data-parallel-size-local"]) == ("6", "3")
    assert head["--host"] == "127.0.0.1"
    assert "--headless" not in head
    assert other["--headless"] is True
    assert other["--data-parallel-start-rank"] == "3"
    assert other.keys() & {"--host", "--port"} == set()
    meeting = ("--data-parallel-address", "--data-parallel-rpc-port")
    assert [head[name] for name in meeting] == [other[name] for name in meeting]
    assert 26000 <= int(head["--data-parallel-rpc-port"]) < 31616


def test_a_replica_over_nodes_is_a_pipeline(tmp_path: Path) -> None:
    (head, _), (other, _) = started(
        tmp_path, nodes=2, server={**SERVER, "nodes_per_replica": 2, "tensor_parallel_size": 8}
    )
    for rank, words in enumerate((head, other)):
        sizes = {name: words[name] for name in ("--tensor-parallel-size", "--pipeline-parallel-size", "--nnodes")}
        assert sizes == {"--tensor-parallel-size": "8", "--pipeline-parallel-size": "2", "--nnodes": "2"}
        assert words["--node-rank"] == str(rank)
    assert other["--headless"] is True
    assert (head["--master-addr"], head["--master-port"]) == (other["--master-addr"], other["--master-port"])


def test_replicas_over_nodes_are_groups_that_meet_apart(tmp_path: Path) -> None:
    rows = [
        words for words, _ in started(tmp_path, nodes=4, server={**SERVER, "nodes_per_replica": 2, "num_replicas": 2})
    ]
    assert [words["--node-rank"] for words in rows] == ["0", "1", "0", "1"]
    assert [words.get("--host") for words in rows] == ["0.0.0.0", None, "0.0.0.0", None]
    assert rows[0]["--master-port"] == rows[1]["--master-port"]
    assert rows[2]["--master-port"] == rows[3]["--master-port"]


def test_servers_behind_our_router_share_the_gpus_of_their_node(tmp_path: Path) -> None:
    rows = started(tmp_path, nodes=2, server={**SERVER, "num_replicas": 4, "balance": "router"})
    assert [gpus for _, gpus in rows] == ["0,1", "2,3", "0,1", "2,3"]
    assert all(words.keys() == {"", "--host", "--port"} for words, _ in rows)
    assert {words["--host"] for words, _ in rows} == {"0.0.0.0"}
    assert rows[0][0]["--port"] != rows[1][0]["--port"]


def test_vllm_spreads_within_processes_and_our_router_between_them(tmp_path: Path) -> None:
    rows = started(tmp_path, nodes=2, server={**SERVER, "num_replicas": 4, "num_tasks": 2, "balance": "router"})
    assert [words["--data-parallel-size"] for words, _ in rows] == ["2", "2"]
    assert all("--headless" not in words and "--data-parallel-address" not in words for words, _ in rows)


def test_another_servers_command_is_told_host_and_port(tmp_path: Path) -> None:
    command = [*PROGRAM, "--listen", "{host}:{port}", "--note", "a 'quoted' $HOME"]
    rows = [words for words, _ in started(tmp_path, server={"command": command, "num_replicas": 2})]
    hosts = [str(words["--listen"]).split(":")[0] for words in rows]
    ports = {str(words["--listen"]).split(":")[1] for words in rows}
    assert hosts == ["127.0.0.1", "127.0.0.1"]
    assert len(ports) == 2
    assert all(words["--note"] == "a 'quoted' $HOME" for words in rows)


def test_a_port_that_is_taken_is_not_found() -> None:
    # `od` says how the dice fell: the third time otherwise.
    dice = "od() { echo x >>$DICE; echo $(($(wc -l <$DICE) > 2 ? 8 : 7)); }; "
    with tempfile.TemporaryDirectory() as directory, listening() as taken:
        find = f"{dice} tasks_per_node=1; free_port {taken - 7}"
        assert int(run_bash(find, "serving", DICE=f"{directory}/dice").stdout) == taken + 1


def test_tasks_of_a_node_never_try_the_same_port() -> None:
    ports = [
        {
            int(port) % 3
            for port in run_bash(f"SLURM_LOCALID={task} tasks_per_node=3; {FIND_MANY}", "serving").stdout.split()
        }
        for task in range(3)
    ]
    assert ports == [{2}, {0}, {1}]  # 20000 is 2 more than a multiple of 3


def test_jobs_of_a_node_that_start_together_begin_at_different_ports() -> None:
    script = "for SLURM_JOB_ID in 1 2 3 176; do for SLURM_NODEID in 0 1; do free_port 20000; done; done"
    ports = [int(port) for port in run_bash(script, "serving").stdout.split()]
    assert ports == [20064, 20065, 20128, 20129, 20192, 20193, 20064, 20065]  # 175 jobs later it begins anew


FIND_MANY = "for _ in 1 2 3 4 5; do free_port 20000; done"


@contextmanager
def listening() -> Iterator[int]:
    """A port that is taken, and the next one is free."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
            yield port
            return


@pytest.mark.parametrize(
    ("visible", "tasks", "task", "own"),
    [("0,1,2,3", 2, 1, "2,3"), ("0,1,2,3", 1, 0, "0,1,2,3"), ("GPU-a,GPU-b", 2, 0, "GPU-a"), ("", 2, 1, "")],
)
def test_tasks_of_a_node_share_its_gpus(visible: str, tasks: int, task: int, own: str) -> None:
    text = f'share_gpus {tasks}; echo "$CUDA_VISIBLE_DEVICES"'
    done = run_bash(text, "gpus", CUDA_VISIBLE_DEVICES=visible, SLURM_LOCALID=str(task))
    assert done.stdout.strip() == own


def test_more_tasks_than_gpus_are_refused_on_the_node() -> None:
    done = run_bash("share_gpus 3", "gpus", CUDA_VISIBLE_DEVICES="0,1", SLURM_LOCALID="0")
    assert done.returncode == 1
    assert "3 tasks on a node that has 2 GPUs" in done.stderr
