"""A Slurm cluster of two virtual nodes on this machine, configured in its own directory; it ends what it started."""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from nemo_rl.distributed.machine import unused_ports

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue")
NODES = ("n1", "n2")
CPUS_OF_A_NODE = 4
DEADLINE_S = 120.0

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
MessageTimeout=100
TCPTimeout=30
BatchStartTimeout=100
UnkillableStepTimeout=600
CompleteWait=0
InactiveLimit=0
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why no cluster can be started here; None: it can."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"Slurm is not installed: {', '.join(missing)}"
    return None if getpass.getuser() == "root" else "a Slurm cluster of its own needs root"


@dataclass(frozen=True, slots=True)
class SlurmCluster:
    directory: Path

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of a shell that submits to this cluster."""
        return {**_without_slurm(os.environ), "SLURM_CONF": str(self.directory / "slurm.conf")}

    def run(self, *command: str) -> str:
        """Return the output of a Slurm command."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        """Slurm's word for the state of a job or array task: "PENDING", "COMPLETED", ..."""
        return self.fields(job)["JobState"]

    def fields(self, job: str) -> dict[str, str]:
        """Return what Slurm reports about one job or array task."""
        words = self.run("scontrol", "show", "job", job, "--oneliner").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_until_ended(self, *jobs: str, deadline_s: float = DEADLINE_S) -> None:
        """Wait until none of them is queued; fail at the deadline with those that are."""
        wait_until(lambda: not self.is_queued(*jobs), self.queue, deadline_s=deadline_s)

    def is_queued(self, *jobs: str) -> bool:
        """Return whether one of them waits or runs."""
        return bool(self.run("squeue", "--noheader", "--jobs", ",".join(jobs), "--format=%i"))

    def queue(self) -> str:
        return self.run("squeue", "--array", "--format=%i %j %T %r")


def wait_until(
    is_so: Callable[[], bool],
    explanation: Callable[[], str] = lambda: "",
    hopeless: Callable[[], bool] = lambda: False,
    deadline_s: float = DEADLINE_S,
) -> None:
    """Wait until the condition holds; fail at the deadline, or once it cannot hold any more, with an explanation."""
    deadline = time.monotonic() + deadline_s
    while not is_so():
        assert time.monotonic() < deadline, f"not so within {deadline_s:g} s: {explanation()}"
        assert not hopeless() or is_so(), f"it will not be so: {explanation()}"
        time.sleep(0.1)


@contextlib.contextmanager
def slurm_cluster(directory: Path) -> Iterator[SlurmCluster]:
    """Start a cluster whose nodes wait for jobs."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (directory / name).mkdir()
    configuration = directory / "slurm.conf"
    configuration.write_text(_configuration(directory))
    commands = [["slurmctld", "-D", "-i", "-f", str(configuration)]]
    commands += [["slurmd", "-D", "-N", node, "-f", str(configuration)] for node in NODES]
    environment = {**_without_slurm(os.environ), "SLURM_CONF": str(configuration)}
    daemons = []
    cluster = SlurmCluster(directory)
    try:
        for command in commands:
            with (directory / "daemons.log").open("ab") as log:
                daemons.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        wait_until(
            lambda: _all_idle(cluster),
            lambda: (directory / "daemons.log").read_text(),
            hopeless=lambda: any(daemon.poll() is not None for daemon in daemons),
        )
        yield cluster
    finally:
        _end(daemons, configuration)


def _configuration(directory: Path) -> str:
    ports = unused_ports(1 + len(NODES))
    host = socket.gethostname().split(".")[0]
    nodes = [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_OF_A_NODE} State=UNKNOWN"
        for node, port in zip(NODES, ports[1:], strict=True)
    ]
    return CONFIGURATION.format(
        host=host, address="127.0.0.1", controller_port=ports[0], directory=directory, nodes="\n".join(nodes)
    )


def _all_idle(cluster: SlurmCluster) -> bool:
    done = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--format=%T"],
        env=cluster.environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return done.stdout.split() == ["idle"] * len(NODES)


def _end(daemons: list[subprocess.Popen[bytes]], configuration: Path) -> None:
    """Return the daemons and the processes of jobs: slurmstepd and what it starts leave their parents."""
    of_cluster = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("SLURM_CONF") == str(configuration):
                of_cluster.append(process)
    own = {daemon.pid for daemon in daemons}
    for process in of_cluster:
        with contextlib.suppress(psutil.Error):
            if process.pid not in own and process.pid != os.getpid():
                process.kill()
    for daemon in daemons:
        daemon.terminate()
    for daemon in daemons:
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait(DEADLINE_S)


def _without_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    """Remove Slurm's variables: a test inside of a job must not talk to that job's cluster."""
    return {name: value for name, value in environment.items() if not name.startswith(("SLURM", "SBATCH", "SRUN"))}
