"""The script inside the sandbox: drops its privileges, then runs the code from standard input.

sandbox.py says what that guarantees. Only the standard library is imported.
"""

import ast
import contextlib
import ctypes
import json
import linecache
import os
import platform
import resource
import signal
import struct
import sys
import traceback
from typing import Any

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = (
    444,
    445,
    446,
)  # the same numbers on all architectures
READ_RIGHTS = 1 << 2 | 1 << 3  # files and directories
ALL_RIGHTS = (1 << 13) - 1  # of Landlock's first version
LATER_RIGHTS = {2: 1 << 13, 3: 1 << 14}  # renaming between directories, truncating
READABLE = ("/usr", "/lib", "/lib64", sys.prefix, sys.base_prefix)

# Refused system calls, by number: asm/unistd_64.h and asm-generic/unistd.h.
# fmt: off
BLOCKED_ON_ALL_MACHINES = {"pidfd_send_signal": 424, "io_uring_setup": 425, "pidfd_open": 434, "clone3": 435,
                      "pidfd_getfd": 438, "mount_setattr": 442, "fchmodat2": 452}
BLOCKED_SYSCALLS = {
    "x86_64": {"shmget": 29, "socket": 41, "socketpair": 53, "clone": 56, "fork": 57, "vfork": 58, "execve": 59,
               "kill": 62, "msgget": 68, "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94,
               "ptrace": 101, "setpgid": 109, "setsid": 112, "rt_sigqueueinfo": 129, "setrlimit": 160, "mount": 165,
               "setxattr": 188, "tkill": 200, "tgkill": 234, "utimes": 235, "keyctl": 250, "fchownat": 260,
               "futimesat": 261, "fchmodat": 268, "unshare": 272, "utimensat": 280, "rt_tgsigqueueinfo": 297,
               "perf_event_open": 298, "prlimit64": 302, "setns": 308, "process_vm_readv": 310,
               "process_vm_writev": 311, "bpf": 321, "execveat": 322},
    "aarch64": {"setxattr": 5, "mount": 40, "fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55,
                "utimensat": 88, "unshare": 97, "ptrace": 117, "kill": 129, "tkill": 130, "tgkill": 131,
                "rt_sigqueueinfo": 138, "setpgid": 154, "setsid": 157, "setrlimit": 164, "msgget": 186,
                "shmget": 194, "socket": 198, "socketpair": 199, "keyctl": 219, "clone": 220, "execve": 221,
                "rt_tgsigqueueinfo": 240, "perf_event_open": 241, "prlimit64": 261, "setns": 268,
                "process_vm_readv": 270, "process_vm_writev": 271, "bpf": 280, "execveat": 281},
}
# fmt: on
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_CALLS = 0x40000000  # x86-64: the same calls under other numbers from here on
EPERM = 1

BLOCKED_EVENTS = ("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill")
FILE_EVENTS = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod")


def main() -> None:
    """Run the code from standard input under the limits given as JSON in the first argument."""
    settings = json.loads(sys.argv[1])
    code = sys.stdin.buffer.read().decode()
    sys.argv = ["tool"]
    drop_privileges(settings)
    run(code)


def drop_privileges(settings: dict[str, Any]) -> None:
    """Apply file access rules, resource limits, the system call filter and the audit hook to this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    is_linux = sys.platform == "linux"
    if is_linux:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        restrict_file_access(libc, os.getcwd())
    signal.setitimer(signal.ITIMER_REAL, settings["wall_s"])
    limits = {
        resource.RLIMIT_CPU: settings["cpu_s"],
        resource.RLIMIT_AS: settings["memory_bytes"],
        resource.RLIMIT_FSIZE: settings["file_bytes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    for limit, value in limits.items():
        with contextlib.suppress(ValueError, OSError):  # a stricter one is set already, or the system has none
            resource.setrlimit(limit, (value, value))
    has_filter = is_linux and install_seccomp_filter(libc)
    # With the filter foreign functions are harmless, and numpy needs them.
    add_audit_hook(os.getcwd(), BLOCKED_EVENTS if has_filter else (*BLOCKED_EVENTS, "ctypes."))


def restrict_file_access(libc: ctypes.CDLL, home: str) -> None:
    """Allow reading the Python installation, and reading and writing `home`, if the kernel has Landlock."""
    version = libc.syscall(LANDLOCK_CREATE_RULESET, None, 0, 1)
    if version < 1:
        return
    rights = ALL_RIGHTS | sum(right for since, right in LATER_RIGHTS.items() if version >= since)
    ruleset = libc.syscall(LANDLOCK_CREATE_RULESET, struct.pack("Q", rights), 8, 0)
    for path in {*READABLE, "/dev/null", "/dev/urandom", home}:
        if os.path.exists(path):
            allowed = rights if path == home else READ_RIGHTS if os.path.isdir(path) else READ_RIGHTS & ~(1 << 3)
            parent = os.open(path, os.O_PATH)
            libc.syscall(LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed, parent), 0)
            os.close(parent)
    libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def install_seccomp_filter(libc: ctypes.CDLL) -> bool:
    """Install a seccomp filter that answers BLOCKED_SYSCALLS with EPERM; return whether the kernel accepted it."""
    machine = platform.machine()
    if machine not in BLOCKED_SYSCALLS:
        return False
    numbers = [*BLOCKED_SYSCALLS[machine].values(), *BLOCKED_ON_ALL_MACHINES.values()]
    load_word, jump_equal, jump_at_least, bpf_return = 0x20, 0x15, 0x35, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | EPERM
    checks = [(jump_at_least, X32_CALLS), *((jump_equal, number) for number in numbers)]
    program = [
        (load_word, 0, 0, 4),  # seccomp_data.arch
        (jump_equal, 1, 0, AUDIT_ARCH[machine]),
        (bpf_return, 0, 0, refuse),
        (load_word, 0, 0, 0),  # seccomp_data.nr
        *((kind, len(checks) - i, 0, operand) for i, (kind, operand) in enumerate(checks)),
        (bpf_return, 0, 0, allow),
        (bpf_return, 0, 0, refuse),
    ]
    instructions = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(instructions)
    fprog = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    return libc.prctl(PR_SET_SECCOMP, 2, fprog, 0, 0) == 0


def add_audit_hook(home: str, refused: tuple[str, ...]) -> None:
    """Refuse these audit events, and changes of files outside `home`, with PermissionError."""
    inside = os.path.realpath(home) + os.sep

    def is_outside(path: object) -> bool:
        if not isinstance(path, str | bytes):
            return False  # an open descriptor
        return not (os.path.realpath(os.fsdecode(path)) + os.sep).startswith(inside) and path != os.devnull

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event.startswith(refused):
            raise PermissionError(f"not allowed in the sandbox: {event}")
        writes = event == "open" and bool(args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if (writes or event.startswith(FILE_EVENTS)) and is_outside(args[0]):
            raise PermissionError(f"not allowed in the sandbox: writing to {args[0]!r}")

    sys.addaudithook(hook)


def run(code: str) -> None:
    """Run the code like a notebook's cell: print the value of a last expression, and tracebacks of the code alone."""
    linecache.cache["<tool>"] = (len(code), None, f"{code}\n".splitlines(keepends=True), "<tool>")
    scope: dict[str, Any] = {"__name__": "__main__"}
    try:
        tree = ast.parse(code, "<tool>")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<tool>", "exec"), scope)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<tool>", "eval"), scope)
            if value is not None:
                sys.stdout.write(f"{value!r}\n")
    except Exception as error:
        sys.stdout.flush()
        own = error.__traceback__.tb_next if error.__traceback__ else None  # skips this file's frame
        traceback.print_exception(type(error), error, own if not isinstance(error, SyntaxError) else None)
        sys.exit(1)


if __name__ == "__main__":
    main()
