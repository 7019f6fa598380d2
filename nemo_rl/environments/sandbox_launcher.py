"""The script inside the sandbox: gives up every privilege, then runs the code from standard input.

sandbox.py says what that guarantees. Every call pays for what is imported here: only modules of the standard library
that import little themselves (not typing, json, ast, enum or signal), and `traceback` after an error.
"""

from __future__ import annotations

import _ast
import _signal  # pyright: ignore[reportMissingImports]
import ctypes
import os
import resource
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38
NUM_CAPABILITIES = 64  # more than any kernel has
READABLE = ("/usr", "/lib", "/lib64", sys.prefix, sys.base_prefix)
DEVICES = ("/dev/null", "/dev/urandom")
HOME_BYTES, HOME_FILES = 64 * 1024 * 1024, 4096  # limits for all files of the code
HOME_OPTIONS = f"mode=700,size={HOME_BYTES},nr_inodes={HOME_FILES}"

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 1 << 12, 1 << 14, 1 << 18, 2
AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_SETATTR = -100, 0x8000, 1, 2, 442
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # Landlock's system calls on every architecture
READ_FILE, READ_DIRECTORY = 1 << 2, 1 << 3
CHANGE_RIGHTS = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8  # write, remove directories and files, make both
SPECIAL_RIGHTS = 1 << 0 | 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 12  # execute; make devices, sockets, pipes, links
REFER, TRUNCATE, IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15  # since versions 2, 3 and 5
SCOPES_SINCE, SCOPES = 6, 1 << 0 | 1 << 1  # abstract sockets and signals

# The system calls that are allowed, as (x86-64, ARM64) numbers: asm/unistd_64.h and asm-generic/unistd.h.
# fmt: off
ALLOWED_CALLS: dict[str, tuple[int | None, int | None]] = {
    # files
    "read": (0, 63), "write": (1, 64), "open": (2, None), "close": (3, 57), "stat": (4, None), "fstat": (5, 80),
    "lstat": (6, None), "lseek": (8, 62), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65),
    "writev": (20, 66), "access": (21, None), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "sendfile": (40, 71), "flock": (73, 32), "fsync": (74, 82), "fdatasync": (75, 83), "ftruncate": (77, 46),
    "getdents": (78, None), "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None), "mkdirat": (258, 34),
    "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35), "readlink": (89, None),
    "readlinkat": (267, 78), "umask": (95, 166), "fadvise64": (221, 223), "openat": (257, 56),
    "newfstatat": (262, 79), "faccessat": (269, 48), "faccessat2": (439, 439), "preadv": (295, 69),
    "pwritev": (296, 70), "preadv2": (327, 286), "pwritev2": (328, 287), "statx": (332, 291),
    "close_range": (436, 436), "pipe": (22, None), "pipe2": (293, 59),
    # memory
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216),
    "msync": (26, 227), "madvise": (28, 233),
    # signals, of this process to itself
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132), "pause": (34, None),
    "alarm": (37, None), "getitimer": (36, 102), "setitimer": (38, 103), "restart_syscall": (219, 128),
    # time and waiting
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create": (213, None),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22),
    "eventfd": (284, None), "eventfd2": (290, 19), "nanosleep": (35, 101), "gettimeofday": (96, 169),
    "time": (201, None), "times": (100, 153), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "futex": (202, 98), "sched_yield": (24, 124),
    # identity and machine
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158), "getresuid": (118, 148),
    "getresgid": (120, 150), "getpgid": (121, 155), "getpgrp": (111, None), "getsid": (124, 156),
    "uname": (63, 160), "getrusage": (98, 165), "sysinfo": (99, 179), "getcpu": (309, 168), "getrandom": (318, 278),
    "rseq": (334, 293),
    # end
    "exit": (60, 93), "exit_group": (231, 94),
}
# Those that are allowed with some arguments only: the number, and the index of the argument.
CHECKED_CALLS = {"fcntl": (72, 25), "ioctl": (16, 29), "prlimit64": (302, 261), "sched_getaffinity": (204, 123)}
FCNTL_COMMANDS = (0, 1, 2, 3, 5, 6, 7, 36, 37, 38, 1030)  # duplicate, flags, record locks: no owner, signal or lease
F_SETFL, O_ASYNC = 4, 0o20000
O_DIRECT = {"x86_64": 0o40000, "aarch64": 0o200000}
IOCTL_REQUESTS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIOCLEX
# fmt: on
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
EPERM = 1

BLOCKED_EVENTS = ("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill")
FILE_EVENTS = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod")


def main() -> None:
    """Run the code from standard input under the limits that the first argument has as a Python dictionary."""
    settings = eval(sys.argv[1], {"__builtins__": {}})  # sandbox.py wrote it
    code = sys.stdin.buffer.read().decode()
    sys.argv = ["tool"]
    held = drop_privileges(settings)
    if settings.get("probe"):
        import json

        sys.stdout.write(json.dumps(held) + "\n")
        return
    run(code)


def drop_privileges(settings: dict[str, Any], *, is_served: bool = False) -> dict[str, Any]:
    """Apply all layers that this system has to this process, and return which hold.

    A process that is served by calls over a pipe bounds the time of each call itself (`is_served`); any other ends
    after the time that `settings` has, and with the thread that started it.
    """
    held: dict[str, Any] = {"view": False, "landlock": 0, "user": os.getuid() if hasattr(os, "getuid") else 0}
    if is_linux := sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        without = settings["without"]
        readable = (*READABLE, *settings.get("readable", ()))
        if "namespaces" not in without:
            held["view"] = enter_private_view(libc, os.getcwd(), readable)
        held["user"] = become_unprivileged(libc, settings["user_id"], is_visible=held["view"])
        if not is_served:
            libc.prctl(PR_SET_PDEATHSIG, _signal.SIGKILL, 0, 0, 0)  # after the change of user, which clears it
        held["landlock"] = restrict_file_access(libc, os.getcwd(), landlock_version(libc, without), readable)
    if not is_served:
        _signal.setitimer(_signal.ITIMER_REAL, settings["wall_s"])
    set_limits(settings)
    held["filter"] = is_linux and install_seccomp_filter(libc)
    # With the filter foreign functions are harmless, and numpy needs them.
    add_audit_hook(os.getcwd(), BLOCKED_EVENTS if held["filter"] else (*BLOCKED_EVENTS, "ctypes."))
    return held


def set_limits(settings: dict[str, Any]) -> None:
    """Set the resource limits of this process."""
    limits = {
        resource.RLIMIT_CPU: settings.get("cpu_s", resource.RLIM_INFINITY),
        resource.RLIMIT_AS: settings["memory_bytes"],
        resource.RLIMIT_FSIZE: settings["file_bytes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
    }
    for limit, value in limits.items():
        try:
            resource.setrlimit(limit, (value, value))
        except (ValueError, OSError):  # a stricter one is set already, or the system has none
            continue


def enter_private_view(libc: ctypes.CDLL, home: str, readable: tuple[str, ...]) -> bool:
    """Leave only `readable` paths, read-only, and an empty `home` in this process's file system, if the kernel lets it.

    `home` is in memory, of at most HOME_BYTES, and goes with the process. Root needs no more; any other user first
    enters a user namespace, in which it keeps its id. The new root is mounted on `home` itself.
    """
    user, group, machine = os.geteuid(), os.getegid(), os.uname().machine
    if machine not in PIVOT_ROOT or libc.unshare(CLONE_NEWNS | (CLONE_NEWUSER if user else 0)):
        return False
    try:
        if user:
            _write("/proc/self/setgroups", "deny")
            _write("/proc/self/uid_map", f"{user} {user} 1")
            _write("/proc/self/gid_map", f"{group} {group} 1")
        _mount(libc, None, "/", None, MS_REC | MS_PRIVATE)
        _mount(libc, "tmpfs", home, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    except OSError:
        return False
    try:
        for path in sorted({*readable, *DEVICES, *map(os.path.realpath, readable)}):  # parents first
            if os.path.exists(path) and not os.path.exists(home + path):
                _bind(libc, path, home + path, MS_REC, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID)
        os.makedirs(home + home, exist_ok=True)
        _mount(libc, "tmpfs", home + home, "tmpfs", MS_NOSUID | MS_NODEV, HOME_OPTIONS)
        os.chdir(home)
        _check(libc.syscall(PIVOT_ROOT[machine], b".", b"."))
        _check(libc.umount2(b".", MNT_DETACH))
        _set_mount_flags(libc, "/", MOUNT_ATTR_RDONLY, recursive=False)
        os.chdir(home)
        return True
    except OSError:
        libc.umount2(home.encode(), MNT_DETACH)
        os.chdir(home)
        return False


def _bind(libc: ctypes.CDLL, source: str, target: str, recursion: int, attributes: int) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _write(target, "")
    _mount(libc, source, target, None, MS_BIND | recursion)
    _set_mount_flags(libc, target, attributes, recursive=True)


def _mount(libc: ctypes.CDLL, source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    _check(libc.mount(*texts, ctypes.c_ulong(flags), data.encode()))


def _set_mount_flags(libc: ctypes.CDLL, path: str, flags: int, *, recursive: bool) -> None:
    attributes = struct.pack("4Q", flags, 0, 0, 0)
    _check(libc.syscall(MOUNT_SETATTR, AT_FDCWD, path.encode(), AT_RECURSIVE * recursive, attributes, len(attributes)))


def _check(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def become_unprivileged(libc: ctypes.CDLL, user_id: int, *, is_visible: bool) -> int:
    """Give up all capabilities, and root's user id for `user_id`; return the user id of the code.

    Root stays itself, without capabilities, if no other user could read the Python installation.
    """
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(NUM_CAPABILITIES):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
            break  # the kernel's last one, or not root
    if os.geteuid() == 0 and (is_visible or all(map(_others_may_read, READABLE))):
        try:
            os.chown(os.getcwd(), user_id, user_id)
            os.setgroups([])
            os.setresgid(user_id, user_id, user_id)
            os.setresuid(user_id, user_id, user_id)
        except OSError:  # a user namespace without such a user
            os.chown(os.getcwd(), os.geteuid(), os.getegid())
    header, no_capabilities = struct.pack("Ii", 0x20080522, 0), bytes(24)
    libc.capset(header, no_capabilities)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    return os.geteuid()


def _others_may_read(path: str) -> bool:
    """Return whether every user can read a directory: all those above it can be passed."""
    path = os.path.realpath(path)
    while path != "/":
        if os.path.exists(path) and os.stat(path).st_mode & 0o001 == 0:
            return False
        path = os.path.dirname(path)
    return True


def landlock_version(libc: ctypes.CDLL, without: list[str]) -> int:
    """Return the version of the kernel's Landlock; 0 without it."""
    return 0 if "landlock" in without else max(0, libc.syscall(CREATE_RULESET, None, 0, 1))


def restrict_file_access(libc: ctypes.CDLL, home: str, version: int, readable: tuple[str, ...]) -> int:
    """Allow reading `readable` paths, and regular files in `home`; return the version that holds, 0 for none."""
    if not version:
        return 0
    since = {2: REFER, 3: TRUNCATE, 5: IOCTL_DEVICE}
    later = sum(right for first, right in since.items() if version >= first)
    home_rights = READ_FILE | READ_DIRECTORY | CHANGE_RIGHTS | later & (REFER | TRUNCATE)
    handled = [home_rights | SPECIAL_RIGHTS | later, 3 if version >= 4 else 0, SCOPES if version >= SCOPES_SINCE else 0]
    size = 24 if version >= SCOPES_SINCE else 16 if version >= 4 else 8  # files, TCP, scopes
    ruleset = libc.syscall(CREATE_RULESET, struct.pack("3Q", *handled), size, 0)
    if ruleset < 0:
        return 0
    for path in {*readable, *DEVICES, home}:
        if os.path.exists(path):
            read_rights = READ_FILE | READ_DIRECTORY if os.path.isdir(path) else READ_FILE
            parent = os.open(path, os.O_PATH)
            allowed = home_rights if path == home else read_rights
            libc.syscall(ADD_RULE, ruleset, 1, struct.pack("=Qi", allowed, parent), 0)
            os.close(parent)
    holds = libc.syscall(RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return version if holds else 0


def install_seccomp_filter(libc: ctypes.CDLL) -> bool:
    """Install a seccomp filter that answers all but the allowed system calls with EPERM; return whether it holds."""
    machine = os.uname().machine
    if machine not in AUDIT_ARCH:
        return False
    instructions = b"".join(struct.pack("HBBI", *instruction) for instruction in filter_program(machine))
    buffer = ctypes.create_string_buffer(instructions)
    fprog = struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(buffer))
    return libc.prctl(PR_SET_SECCOMP, 2, fprog, 0, 0) == 0


def filter_program(machine: str) -> list[tuple[int, int, int, int]]:
    """Return the filter as classic BPF instructions: (code, jump if true, jump if false, operand).

    Numbers of another architecture, x86's 32-bit and x32 calls among them, match nothing and are refused.
    """
    load, equal, any_bit, end = 0x20, 0x15, 0x45, 0x06
    allow, refuse = (end, 0, 0, 0x7FFF0000), (end, 0, 0, 0x00050000 | EPERM)
    column = list(AUDIT_ARCH).index(machine)
    numbers = {name: call[column] for name, call in CHECKED_CALLS.items()}

    def argument(index: int, *, high: bool = False) -> tuple[int, int, int, int]:
        return load, 0, 0, 16 + 8 * index + 4 * high  # both architectures are little-endian

    def only_if(number: int, body: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
        return [(equal, 0, len(body), number), *body]  # the body ends with a verdict

    def one_of(values: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
        return [line for value in values for line in ((equal, 0, 1, value), allow)]

    refused_flags = O_ASYNC | O_DIRECT[machine]
    flags = [(equal, 0, 3, F_SETFL), argument(2), (any_bit, 1, 0, refused_flags)]
    fcntl_body = [argument(1), *one_of(FCNTL_COMMANDS), *flags]
    is_null = [argument(2), (equal, 0, 4, 0), argument(2, high=True), (equal, 0, 2, 0)]
    of_itself = [argument(0), (equal, 0, 1, 0), allow, refuse]
    program = [(load, 0, 0, 4), (equal, 1, 0, AUDIT_ARCH[machine]), refuse, (load, 0, 0, 0)]  # arch, then the number
    for call in ALLOWED_CALLS.values():
        if (number := call[column]) is not None:
            program += only_if(number, [allow])
    program += only_if(numbers["fcntl"], [*fcntl_body, allow, refuse])
    program += only_if(numbers["ioctl"], [argument(1), *one_of(IOCTL_REQUESTS), refuse])
    program += only_if(numbers["prlimit64"], [*is_null, argument(0), (equal, 1, 0, 0), refuse, allow])
    program += only_if(numbers["sched_getaffinity"], of_itself)
    return [*program, refuse]


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
    if "traceback" in code:
        show_source(code)
    scope: dict[str, Any] = {"__name__": "__main__"}
    try:
        tree: Any = compile(code, "<tool>", "exec", _ast.PyCF_ONLY_AST)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
        exec(compile(tree, "<tool>", "exec"), scope)
        if last is not None:
            value = eval(compile(_ast.Expression(last.value), "<tool>", "eval"), scope)
            if value is not None:
                sys.stdout.write(f"{value!r}\n")
    except Exception as error:  # the snippet's own error: shown as its output  # noqa: BLE001
        sys.stdout.flush()
        own = error.__traceback__.tb_next if error.__traceback__ else None  # skips this file's frame
        if isinstance(error, MemoryError | OSError):
            scope.clear()  # memory and open files, which the next lines need too
        report(error, own if not isinstance(error, SyntaxError) else None, code)
        sys.exit(1)


def show_source(code: str) -> None:
    """Let tracebacks show the lines of the code."""
    import linecache

    linecache.cache["<tool>"] = (len(code), None, f"{code}\n".splitlines(keepends=True), "<tool>")


def report(error: Exception, where: Any, code: str) -> None:
    """Print the error with its traceback; without one if the code has left nothing to make it with."""
    try:
        import traceback

        show_source(code)
        traceback.print_exception(type(error), error, where)
    except Exception:  # the snippet left nothing to format with  # noqa: BLE001
        sys.stderr.write(f"{type(error).__name__}: {error}\n")


if __name__ == "__main__":
    main()
