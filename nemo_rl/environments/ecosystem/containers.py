"""Bubblewrap containers over this machine's programs: the files of one rollout, and no network."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_rl.environments.ecosystem.relayed_port import interpreter_directories, relay
from nemo_rl.environments.harness import Harness, Places
from nemo_rl.types import Prompt

SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")  # directories of /; links if / and /usr are merged
PATH = "/usr/local/bin:/usr/bin:/bin"
VARIABLES = {"PATH": PATH, "HOME": "/tmp", "LANG": "C.UTF-8"}
LIMITS = "ulimit -f 262144 -u 4096"  # KiB per file, processes per user
TMP_BYTES = 512 * 1024 * 1024  # size of /tmp, which is in memory
MAX_OUTPUT_BYTES = 1024 * 1024  # output of a program; the rest is never read
WORKDIR, HOME = "/app", "/home/agent"  # inside
USER_ID = 1000
ACCOUNTS = f"agent:x:{USER_ID}:{USER_ID}::{HOME}:/bin/bash\n"  # /etc/passwd of a harness: Node asks who runs it


class Container:
    """The files of one rollout; programs run in their own namespaces: no network, /usr read-only, /app persistent."""

    def __init__(self, work: Path, address_space_gb: float | None = None) -> None:
        """`address_space_gb`: per process; None: unlimited."""
        self._work = work
        kib = "unlimited" if address_space_gb is None else str(int(address_space_gb * 1024 * 1024))
        self._limits = f"{LIMITS} -v {kib}"
        self.app.mkdir(parents=True)

    @property
    def app(self) -> Path:
        return self._work / "app"

    def make_logs(self) -> Path:
        """Make and return the directory of the tests' rewards, which nothing has reached before."""
        directory = self._work / "logs" / "verifier"
        directory.mkdir(parents=True)
        return directory

    def argv(self, command: str, *, tests: Path | None = None) -> list[str]:
        """Return the program that runs a command; with `tests`, they and /logs are mounted too."""
        binds = (
            [] if tests is None else ["--ro-bind", str(tests), "/tests", "--bind", str(self._work / "logs"), "/logs"]
        )
        binds += ["--clearenv"]
        for name, value in VARIABLES.items():
            binds += ["--setenv", name, value]
        return [*self._enter(binds), "/bin/bash", "-c", f"{self._limits}; {command}"]

    async def run(self, command: str, *, timeout_s: float, tests: Path | None = None) -> tuple[int | None, str]:
        """Run a command and return exit status and output; status None if it was killed at its deadline."""
        environment = {"PATH": os.environ.get("PATH", os.defpath)}  # the container can read it: /proc/1 is bwrap
        return await _run(self.argv(command, tests=tests), environment, timeout_s)

    async def run_harness(
        self,
        harness: Harness,
        prompt: Prompt,
        base_url: str,
        api_key: str,
        *,
        mounts: Sequence[str],
        timeout_s: float,
    ) -> tuple[int | None, str, bool]:
        """Run a harness in /app; return its exit status, its output and whether it connected to the gateway.

        `mounts`: further directories of this machine, read-only at the same paths.
        """
        home, accounts = self._work / "home", self._work / "passwd"
        home.mkdir()
        accounts.write_text(ACCOUNTS)
        binds = ["--bind", str(home), HOME, "--ro-bind", str(accounts), "/etc/passwd"]
        for directory in (*interpreter_directories(), *mounts):
            binds += ["--ro-bind", directory, directory]
        async with relay(base_url) as port:
            launch = harness.prepare(prompt, port.base_url, api_key, Places(home, self.app, HOME, WORKDIR))
            program, *arguments = launch.argv
            path = f"{Path(program).parent}:{PATH}" if os.path.isabs(program) else PATH
            environment = {**VARIABLES, "PATH": path, **launch.environment}  # not by --setenv, which others could read
            start = f'{self._limits}; exec "$@"'
            argv = [*self._enter(binds), "/bin/bash", "-c", start, "bash", *port.launcher, program, *arguments]
            status, output = await _run(argv, environment, timeout_s, pass_fds=port.pass_fds)
        return status, output, port.num_connections > 0

    def _enter(self, binds: Sequence[str]) -> list[str]:
        """Return the beginning of a command line that a program inside follows; `binds` are more options."""
        user = str(USER_ID)
        argv = [shutil.which("bwrap") or "bwrap", "--unshare-all", "--die-with-parent", "--new-session"]
        argv += ["--uid", user, "--gid", user, "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
        argv += ["--size", str(TMP_BYTES), "--tmpfs", "/tmp"]
        for name in SYSTEM:
            path = Path("/") / name
            if path.is_symlink():
                argv += ["--symlink", os.readlink(path), str(path)]
            elif path.is_dir():
                argv += ["--ro-bind", str(path), str(path)]
        for name in ("/etc/alternatives", "/etc/ld.so.cache"):
            argv += ["--ro-bind-try", name, name]
        return [*argv, "--bind", str(self.app), WORKDIR, *binds, "--chdir", WORKDIR]


async def _run(
    argv: Sequence[str], environment: Mapping[str, str], timeout_s: float, *, pass_fds: Sequence[int] = ()
) -> tuple[int | None, str]:
    """Return exit status and output; status None if the program was killed at its deadline."""
    with tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
            pass_fds=pass_fds,
        )
        status: int | None = None
        try:
            async with asyncio.timeout(timeout_s):
                status = await process.wait()
        except TimeoutError:
            pass
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # bwrap; its namespace ends with it
                await process.wait()
        output.seek(0)
        return status, output.read(MAX_OUTPUT_BYTES).decode(errors="replace")
