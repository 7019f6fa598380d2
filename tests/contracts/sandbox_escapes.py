"""Programs that try to leave the sandbox, by name, and the world outside that is compared before and after each.

Run as a script, by any user: tries every program and prints the ones that got out as JSON, by name. Those that leave
their process as it is are tried one after the other in one sandbox; where anything there is not as it should be, each
of them is tried again in a sandbox of its own, which tells which one got out.
A program prints ESCAPED where it has what it wanted, and REACHED where the kernel looked at its arguments instead of
refusing the call. Whatever it prints, nothing outside may have changed.
"""

import json
import os
import platform
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from nemo_rl.environments import sandbox
from nemo_rl.environments.sandbox_launcher import DEVICES, READABLE

SECRET = "the-trainers-secret"
LIMITS = sandbox.SandboxLimits(cpu_s=20, wall_s=60, memory_bytes=256 * 1024 * 1024, max_output_chars=1 << 20)
SHOWN = [*READABLE, *map(os.path.realpath, READABLE), *DEVICES, tempfile.gettempdir()]
ROOT_NAMES = sorted({path.split("/")[1] for path in SHOWN})  # of the private view: the first directory of each path
REFUSED = "{1, 2, 13, 17, 20, 30, 38}"  # EPERM, ENOENT, EACCES, EEXIST, ENOTDIR, EROFS, ENOSYS
PRELUDE = f"""
import ctypes, os
OUT, SEEN = 'ESC' + 'APED', 'REA' + 'CHED'  # not as the source has them, which tracebacks quote
libc = ctypes.CDLL(None, use_errno=True)
def report(result, error=None):
    error = ctypes.get_errno() if error is None else error
    print(OUT if result >= 0 else 'refused' if error in {REFUSED} else SEEN, result, error)
def call(x86, arm, *args):
    number = x86 if {platform.machine() == "x86_64"} else arm
    if number is not None:
        args = [ctypes.c_long(a) if isinstance(a, int) else a.encode() if isinstance(a, str) else a for a in args]
        report(libc.syscall(ctypes.c_long(number), *args))
def read(path):
    try:
        print(OUT, open(path, 'rb').read(100))
    except OSError as error:
        report(-1, error.errno)
def write(path, flags=os.O_WRONLY, mode=0o666):
    report(libc.open(path.encode(), flags, mode))
def listing(path, allowed=()):
    try:
        print(OUT if set(os.listdir(path)) - set(allowed) else 'refused')
    except OSError as error:
        report(-1, error.errno)
buffer = ctypes.create_string_buffer(4096)
"""

# By name: the x86-64 and ARM64 numbers of a system call (None: it has none), and its arguments as Python.
CALLS: dict[str, tuple[int | None, int | None, str]] = {
    # processes
    "fork": (57, None, ""),
    "clone": (56, 220, "17, 0, 0, 0, 0"),
    "clone a thread": (56, 220, "0x50f00, 0, 0, 0, 0"),
    "clone into namespaces": (56, 220, "0x10000011, 0, 0, 0, 0"),
    "clone3": (435, 435, "buffer, 88"),
    "execve": (59, 221, "'/bin/true', 0, 0"),
    "execveat": (322, 281, "-100, '/bin/true', 0, 0, 0"),
    "setpgid": (109, 154, "0, 0"),
    "setsid": (112, 157, ""),
    # signals
    "kill": (62, 129, "VICTIM, 9"),
    "kill everything": (62, 129, "-1, 0"),
    "kill the parent": (62, 129, "os.getppid(), 0"),
    "kill the group": (62, 129, "0, 0"),
    "tkill": (200, 130, "VICTIM, 9"),
    "tgkill": (234, 131, "VICTIM, VICTIM, 9"),
    "rt_sigqueueinfo": (129, 138, "VICTIM, 9, buffer"),
    "rt_tgsigqueueinfo": (297, 240, "VICTIM, VICTIM, 9, buffer"),
    "pidfd_open": (434, 434, "VICTIM, 0"),
    "pidfd_send_signal": (424, 424, "0, 9, 0, 0"),
    "pidfd_getfd": (438, 438, "0, 0, 0"),
    "timer_create": (222, 107, "0, 0, buffer"),
    "signalfd": (289, 74, "-1, buffer, 8, 0"),
    "fcntl F_SETOWN": (72, 25, "0, 8, VICTIM"),
    "fcntl F_SETOWN of a group": (72, 25, "0, 8, -VICTIM"),
    "fcntl F_SETOWN_EX": (72, 25, "0, 15, buffer"),
    "fcntl F_SETSIG": (72, 25, "0, 10, 9"),
    "fcntl O_ASYNC": (72, 25, "0, 4, 0o20000"),
    "fcntl F_SETLEASE": (72, 25, "1, 1024, 1"),
    "fcntl F_NOTIFY": (72, 25, "os.open('.', os.O_RDONLY), 1026, 7"),
    "fcntl F_SETPIPE_SZ": (72, 25, "0, 1031, 1 << 20"),
    "fcntl F_SETFL with high bits": (72, 25, "0, 4 | 1 << 40, 0o20000"),
    "ioctl FIOASYNC": (16, 29, "0, 0x5452, b'\\x01\\x00\\x00\\x00'"),
    "ioctl FIOSETOWN": (16, 29, "0, 0x8901, b'\\x01\\x00\\x00\\x00'"),
    "ioctl SIOCSPGRP": (16, 29, "0, 0x8902, b'\\x01\\x00\\x00\\x00'"),
    "ioctl TIOCSTI": (16, 29, "0, 0x5412, b'x'"),
    "ioctl TIOCSCTTY": (16, 29, "0, 0x540E, 0"),
    "ioctl TIOCSPGRP": (16, 29, "0, 0x5410, buffer"),
    "ioctl FS_IOC_SETFLAGS": (16, 29, "1, 0x40086602, buffer"),
    "ioctl FICLONE": (16, 29, "1, 0x40049409, 0"),
    # other processes' memory and scheduling
    "ptrace": (101, 117, "16, VICTIM, 0, 0"),
    "ptrace seize": (101, 117, "0x4206, VICTIM, 0, 0"),
    "ptrace the parent": (101, 117, "16, os.getppid(), 0, 0"),
    "process_vm_readv": (310, 270, "VICTIM, buffer, 1, buffer, 1, 0"),
    "process_vm_writev": (311, 271, "VICTIM, buffer, 1, buffer, 1, 0"),
    "process_madvise": (440, 440, "0, buffer, 1, 20, 0"),
    "process_mrelease": (448, 448, "0, 0"),
    "kcmp": (312, 272, "VICTIM, VICTIM, 1, 0, 0"),
    "sched_setaffinity": (203, 122, "VICTIM, 8, b'\\x01' + bytes(7)"),
    "sched_getaffinity of another": (204, 123, "VICTIM, 128, buffer"),
    "sched_setscheduler": (144, 119, "VICTIM, 5, bytes(4)"),
    "sched_setparam": (142, 118, "VICTIM, bytes(4)"),
    "sched_setattr": (314, 274, "VICTIM, bytes([48]) + bytes(47), 0"),
    "setpriority": (141, 140, "0, VICTIM, 19"),
    "setpriority of a user": (141, 140, "2, 1, 19"),
    "getpriority of another": (140, 141, "0, VICTIM"),
    "ioprio_set": (251, 30, "1, VICTIM, 3 << 13"),
    "prlimit of another": (302, 261, "VICTIM, 7, (5).to_bytes(8, 'little') * 2, 0"),
    "prlimit reads another": (302, 261, "VICTIM, 7, 0, buffer"),
    "prlimit of itself": (302, 261, "0, 6, (-1).to_bytes(8, 'little', signed=True) * 2, 0"),
    "setrlimit": (160, 164, "6, (-1).to_bytes(8, 'little', signed=True) * 2"),
    "migrate_pages": (256, 238, "VICTIM, 8, buffer, buffer"),
    "move_pages": (279, 239, "VICTIM, 0, 0, 0, 0, 0"),
    "mlock": (149, 228, "buffer, 4096"),
    "mlockall": (151, 230, "1"),
    # sockets and ways around them
    "socket inet": (41, 198, "2, 1, 0"),
    "socket inet6": (41, 198, "10, 1, 0"),
    "socket unix": (41, 198, "1, 1, 0"),
    "socket netlink": (41, 198, "16, 3, 0"),
    "socket packet": (41, 198, "17, 3, 0"),
    "socket alg": (41, 198, "38, 5, 0"),
    "socket vsock": (41, 198, "40, 1, 0"),
    "socketpair": (53, 199, "1, 1, 0, buffer"),
    "connect": (42, 203, "0, buffer, 16"),
    "bind": (49, 200, "0, buffer, 16"),
    "sendto": (44, 206, "0, buffer, 1, 0, 0, 0"),
    "sendmsg": (46, 211, "0, buffer, 0"),
    "io_uring_setup": (425, 425, "8, buffer"),
    "io_uring_enter": (426, 426, "0, 1, 0, 0, 0, 0"),
    "io_uring_register": (427, 427, "0, 0, 0, 0"),
    "io_setup": (206, 0, "8, buffer"),
    "bpf": (321, 280, "0, buffer, 72"),
    "perf_event_open": (298, 241, "buffer, 0, -1, -1, 0"),
    "userfaultfd": (323, 282, "1"),
    "fanotify_init": (300, 262, "0, 0"),
    "inotify_init1": (294, 26, "0"),
    "timerfd_create": (283, 85, "1, 0"),
    # memory and messages between processes
    "shmget": (29, 194, "0x5A5A, 4096, 0o1777"),
    "shmat": (30, 196, "0, 0, 0"),
    "msgget": (68, 186, "0x5A5A, 0o1777"),
    "semget": (64, 190, "0x5A5A, 1, 0o1777"),
    "semop": (65, 193, "0, buffer, 1"),
    "mq_open": (240, 180, "'escape', 0o102, 0o666, 0"),
    "mq_unlink": (241, 181, "'escape'"),
    "memfd_create": (319, 279, "'escape', 0"),
    "memfd_secret": (447, 447, "0"),
    "add_key": (248, 217, "'user', 'escape', b'x', 1, -3"),
    "request_key": (249, 218, "'user', 'escape', 0, -3"),
    "keyctl": (250, 219, "0, -3, 1"),
    # modes, owners, times and attributes of files
    "chmod": (90, None, "OUTSIDE + '/victim', 0o777"),
    "fchmod": (91, 52, "0, 0o777"),
    "fchmodat": (268, 53, "-100, OUTSIDE + '/victim', 0o777"),
    "fchmodat2": (452, 452, "-100, OUTSIDE + '/victim', 0o777, 0"),
    "chown": (92, None, "OUTSIDE + '/victim', 1, 1"),
    "lchown": (94, None, "OUTSIDE + '/victim', 1, 1"),
    "fchown": (93, 55, "0, 1, 1"),
    "fchownat": (260, 54, "-100, OUTSIDE + '/victim', 1, 1, 0"),
    "utime": (132, None, "OUTSIDE + '/victim', 0"),
    "utimes": (235, None, "OUTSIDE + '/victim', 0"),
    "futimesat": (261, None, "-100, OUTSIDE + '/victim', 0"),
    "utimensat": (280, 88, "-100, OUTSIDE + '/victim', 0, 0"),
    "setxattr": (188, 5, "OUTSIDE + '/victim', 'user.escape', b'x', 1, 0"),
    "lsetxattr": (189, 6, "OUTSIDE + '/victim', 'user.escape', b'x', 1, 0"),
    "lsetxattr of an access list": (189, 6, "OUTSIDE + '/victim', 'system.posix_acl_access', ACL, len(ACL), 0"),
    "fsetxattr": (190, 7, "1, 'user.escape', b'x', 1, 0"),
    "setxattrat": (463, 463, "-100, OUTSIDE + '/victim', 0, 'user.escape', buffer, 16"),
    "removexattr": (197, 14, "OUTSIDE + '/victim', 'user.escape'"),
    "getxattr": (191, 8, "OUTSIDE + '/victim', 'user.kept', buffer, 100"),
    # making and reaching files
    "mknod device": (133, None, "'device', 0o20666, 0x103"),
    "mknodat device": (259, 33, "-100, 'device', 0o20666, 0x103"),
    "mknod disk": (133, None, "'disk', 0o60666, 0x800"),
    "mknodat fifo": (259, 33, "-100, 'fifo', 0o10666, 0"),
    "mknodat outside": (259, 33, "-100, OUTSIDE + '/fifo', 0o10666, 0"),
    "link": (86, None, "OUTSIDE + '/victim', 'mine'"),
    "linkat": (265, 37, "-100, OUTSIDE + '/victim', -100, 'mine', 0"),
    "symlink": (88, None, "OUTSIDE + '/victim', 'mine'"),
    "symlinkat": (266, 36, "OUTSIDE + '/victim', -100, 'mine'"),
    "truncate": (76, 45, "OUTSIDE + '/open', 0"),
    "mkdirat outside": (258, 34, "-100, OUTSIDE + '/made', 0o777"),
    "unlinkat outside": (263, 35, "-100, OUTSIDE + '/victim', 0"),
    "rmdir outside": (263, 35, "-100, OUTSIDE + '/directory', 0x200"),
    "renameat2 outside": (316, 276, "-100, OUTSIDE + '/victim', -100, OUTSIDE + '/renamed', 0"),
    "renameat2 into the sandbox": (316, 276, "-100, OUTSIDE + '/victim', -100, 'mine', 0"),
    "name_to_handle_at": (303, 264, "-100, '/', b'\\x80' + bytes(200), buffer, 0"),
    "open_by_handle_at": (304, 265, "0, b'\\x08' + bytes(200), 0"),
    "openat2": (437, 437, "-100, OUTSIDE + '/open', bytes([2]) + bytes(23), 24"),
    "copy_file_range": (326, 285, "0, 0, 1, 0, 1, 0"),
    "splice": (275, 76, "0, 0, 1, 0, 1, 0"),
    "fallocate": (285, 47, "1, 0, 0, 1 << 30"),
    "sync": (162, 81, ""),
    # namespaces, mounts and the machine
    "chroot": (161, 51, "'.'"),
    "unshare user": (272, 97, "0x10000000"),
    "unshare mounts": (272, 97, "0x20000"),
    "unshare network": (272, 97, "0x40000000"),
    "setns": (308, 268, "0, 0"),
    "mount": (165, 40, "'escape', '.', 'tmpfs', 0, 0"),
    "umount2": (166, 39, "'/', 2"),
    "pivot_root": (155, 41, "'.', '.'"),
    "fsopen": (430, 430, "'tmpfs', 0"),
    "open_tree": (428, 428, "-100, '/', 1"),
    "move_mount": (429, 429, "-100, '.', -100, '/', 0"),
    "mount_setattr": (442, 442, "-100, '/', 0, bytes(32), 32"),
    "swapoff": (168, 225, "'/none'"),
    "sethostname": (170, 161, "'escape', 6"),
    "setdomainname": (171, 162, "'escape', 6"),
    "reboot": (169, 142, "0, 0, 0, 0"),
    "init_module": (175, 105, "buffer, 10, ''"),
    "finit_module": (313, 273, "0, '', 0"),
    "delete_module": (176, 106, "'none', 0"),
    "kexec_load": (246, 104, "0, 0, 0, 0"),
    "syslog": (103, 116, "3, buffer, 100"),
    "acct": (163, 89, "'none'"),
    "quotactl": (179, 60, "0, 0, 0, 0"),
    "iopl": (172, None, "3"),
    "ioperm": (173, None, "0, 1, 1"),
    "vhangup": (153, 58, ""),
    "adjtimex": (159, 171, "bytes(208)"),
    "settimeofday": (164, 170, "0, 0"),
    "clock_settime": (227, 112, "99, 0"),
    "modify_ldt": (154, None, "0, buffer, 10"),
    "personality": (135, 92, "0x0040000"),
    # privileges
    "setuid": (105, 146, "0"),
    "setgid": (106, 144, "0"),
    "setresuid": (117, 147, "0, 0, 0"),
    "setgroups": (116, 159, "0, 0"),
    "setfsuid": (122, 151, "0"),
    "capset": (126, 91, "b'\\x22\\x05\\x08\\x20' + bytes(4), b'\\xff' * 24"),
    "prctl dumpable": (157, 167, "4, 1, 0, 0, 0"),
    "prctl of the tracer": (157, 167, "0x59616D61, -1, 0, 0, 0"),
    "prctl without its death signal": (157, 167, "1, 0, 0, 0, 0"),
    "seccomp": (317, 277, "0, 0, 0"),
    "landlock_create_ruleset": (444, 444, "0, 0, 1"),
    "x32 getpid": (0x40000000 + 39, None, ""),
    "x32 execve": (0x40000000 + 520, None, "'/bin/true', 0, 0"),
}
CALLS_PRELUDE = "ACL = b''.join(x.to_bytes(n, 'little') for x, n in ((2, 4), (1, 2), (6, 2), (0xFFFFFFFF, 4)))\n"

# Whole programs, by name.
PROGRAMS: dict[str, str] = {
    "signal by an asynchronous pipe": """
import fcntl
r, w = os.pipe()
for command, value in ((8, VICTIM), (10, 9), (4, 0o20000 | os.O_NONBLOCK)):
    libc.fcntl(r, command, value)
os.write(w, b'x')""",
    "os.fork": "print(OUT, os.fork())",
    "os.system": "print(OUT, os.system('true'))",
    "subprocess": "import subprocess; print(OUT, subprocess.run(['/bin/true']))",
    "posix_spawn": "print(OUT, os.posix_spawn('/bin/true', ['true'], {}))",
    "multiprocessing": "import multiprocessing as m; p = m.Process(target=print); p.start(); print(OUT)",
    "thread": "import threading; threading.Thread(target=print).start(); print(OUT)",
    "tcp connection": "import socket; socket.create_connection(('127.0.0.1', PORT)); print(OUT)",
    "unix socket": "import socket; socket.socket(socket.AF_UNIX).connect(OUTSIDE + '/socket'); print(OUT)",
    "abstract socket": "import _socket; _socket.socket(1, 1).connect('\\0' + ABSTRACT); print(OUT)",
    "socketpair by Python": "import _socket; print(OUT, _socket.socketpair())",
    "socket in its directory": "import _socket; _socket.socket(1, 1).bind('here'); print(OUT)",
    "asyncio server": "import asyncio; asyncio.run(asyncio.start_server(print, '0.0.0.0', 0)); print(OUT)",
    "audit hook replaced": "import sys; sys.addaudithook(lambda *a: None); os.system('true') == 0 and print(OUT)",
    "write": "write(OUTSIDE + '/open')",
    "append": "write(OUTSIDE + '/open', os.O_WRONLY | os.O_APPEND)",
    "truncate on opening": "write(OUTSIDE + '/open', os.O_WRONLY | os.O_TRUNC)",
    "create": "write(OUTSIDE + '/new', os.O_WRONLY | os.O_CREAT)",
    "unnamed file outside": "write(OUTSIDE, os.O_WRONLY | 0o20200000)",
    "create by a climbing path": "write('../' * 20 + OUTSIDE + '/new', os.O_WRONLY | os.O_CREAT)",
    "create after chdir": "os.chdir(OUTSIDE); write('new', os.O_WRONLY | os.O_CREAT)",
    "create beside its directory": "write('../new-' + str(os.getpid()), os.O_WRONLY | os.O_CREAT)",
    "create through /proc/self/root": "write('/proc/self/root' + OUTSIDE + '/new', os.O_WRONLY | os.O_CREAT)",
    "create through /proc/self/cwd": "write('/proc/self/cwd/../new', os.O_WRONLY | os.O_CREAT)",
    "write to the Python installation": """
import sys
write(sys.prefix + '/escape', os.O_WRONLY | os.O_CREAT)
write(os.path.dirname(os.__file__) + '/escape', os.O_WRONLY | os.O_CREAT)""",
    "change a module of the installation": "write(os.__file__)",
    "write to /dev/shm": "write('/dev/shm/escape', os.O_WRONLY | os.O_CREAT)",
    "write to /tmp": "write('/tmp/escape-x', os.O_WRONLY | os.O_CREAT)",
    "write to /var/tmp": "write('/var/tmp/escape-x', os.O_WRONLY | os.O_CREAT)",
    "read a file of the trainer": "read(OUTSIDE + '/secret')",
    "read /etc/passwd": "read('/etc/passwd')",
    "read /etc/shadow": "read('/etc/shadow')",
    "read the trainer's environment": "read(f'/proc/{VICTIM}/environ')",
    "read the parent's environment": "read(f'/proc/{os.getppid()}/environ')",
    "read the trainer's memory": "read(f'/proc/{VICTIM}/mem')",
    "write the trainer's memory": "write(f'/proc/{VICTIM}/mem', os.O_RDWR)",
    "read the trainer's command line": "read(f'/proc/{VICTIM}/cmdline')",
    "write the trainer's oom score": "write(f'/proc/{VICTIM}/oom_score_adj')",
    "write the trainer's name": "write(f'/proc/{VICTIM}/comm')",
    "read through the trainer's root": "read(f'/proc/{VICTIM}/root' + OUTSIDE + '/secret')",
    "read through the trainer's descriptors": "listing(f'/proc/{VICTIM}/fd')",
    "read /proc/self/mountinfo": "read('/proc/self/mountinfo')",
    "read /proc/kallsyms": "read('/proc/kallsyms')",
    "read /proc/version": "read('/proc/version')",
    "write /proc/sys": "write('/proc/sys/kernel/core_pattern')",
    "write /proc/sysrq-trigger": "write('/proc/sysrq-trigger')",
    "write /sys": "write('/sys/kernel/uevent_helper'); write('/sys/kernel/mm/ksm/run')",
    "make a control group": "report(libc.mkdir(b'/sys/fs/cgroup/escape', 0o755))",
    "list the root": f"listing('/', {ROOT_NAMES})",
    "list other sandboxes": "listing('..', [os.path.basename(os.getcwd())])",
    "list the trainer's files": "listing(OUTSIDE)",
    "open the disk": "write('/dev/vda', os.O_RDWR); write('/dev/sda', os.O_RDWR)",
    "open the memory": "write('/dev/mem', os.O_RDWR)",
    "open the kernel's log": "write('/dev/kmsg')",
    "open the terminal": "write('/dev/tty', os.O_RDWR)",
    "open a new terminal": "write('/dev/ptmx', os.O_RDWR)",
    "open fuse": "write('/dev/fuse', os.O_RDWR)",
    "open kvm": "write('/dev/kvm', os.O_RDWR)",
    "open a loop device": "write('/dev/loop-control', os.O_RDWR)",
    "open the GPU": "write('/dev/nvidiactl', os.O_RDWR)",
    "inherited descriptors": """
for descriptor in range(3, 64):
    try:
        os.fstat(descriptor); print(OUT, descriptor)
    except OSError:
        pass""",
    "environment variables": "print(dict(os.environ))",
    "more memory than allowed": "x = bytearray(1 << 29); print(OUT)",
    "more files than allowed": "x = [open('/dev/null') for _ in range(65)]; print(OUT)",
    "a file larger than allowed": "open('big', 'wb').write(bytes(8 << 20)) > (4 << 20) and print(OUT)",
    "3,000 nested directories": "for _ in range(3000): os.mkdir('d'); os.chdir('d')",
    "directories without access": "os.mkdir('a', 0o300); os.mkdir('a/b', 0o0); os.mkdir('c', 0)",
    "names that are no text": "os.mkdir(b'\\xff\\xfe'); open(b'\\xff\\xfe/\\n\\xff', 'w')",
}
if platform.machine() == "x86_64":
    PROGRAMS["32-bit system call"] = """
import mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex('5389c0b814000000cd805bc3'))  # getpid by int 0x80
report(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))(), 1)"""

ATTEMPTS = PROGRAMS | {
    name: f"{CALLS_PRELUDE}call({x86}, {arm}, {arguments})" for name, (x86, arm, arguments) in CALLS.items()
}
# Attempts that use up, end or change the process that they run in, or look at what it has open.
ALONE = [
    "signal by an asynchronous pipe",
    "audit hook replaced",
    "inherited descriptors",
    "more memory than allowed",
    "more files than allowed",
    "a file larger than allowed",
    "3,000 nested directories",
    "directories without access",
    "names that are no text",
    *(name for name in PROGRAMS if name == "32-bit system call"),
]
ONE_BY_ONE = """
home, tried = os.getcwd(), 0
for name, code in {attempts!r}.items():
    print('--', name)
    try:
        exec(code, dict(globals()))
    except BaseException as error:
        print(type(error), error)
    os.chdir(home)
    tried += 1
print('tried', tried)"""


class Outside:
    """The world outside the sandbox: files, sockets, a process; `state` is compared before and after each attempt."""

    def __init__(self, directory: str) -> None:
        os.chmod(directory, 0o777)
        self._directory = directory
        for name, mode in (("victim", 0o644), ("open", 0o666), ("secret", 0o644)):
            path = Path(directory, name)
            path.write_text(SECRET)
            path.chmod(mode)
        Path(directory, "directory").mkdir(mode=0o777)
        self._abstract = os.path.basename(os.path.dirname(directory))  # unique on the machine, as the directory is
        self._listeners = [socket.socket(), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
        for listener, address in zip(
            self._listeners, (("127.0.0.1", 0), f"{directory}/socket", f"\0{self._abstract}"), strict=True
        ):
            listener.bind(address)
            listener.listen()
        os.chmod(f"{directory}/socket", 0o777)
        self.victim = subprocess.Popen(["sleep", "10000"], env={"KEY": SECRET}, start_new_session=True)

    def program(self, code: str) -> str:
        """Return the whole program of an attempt."""
        port = self._listeners[0].getsockname()[1]
        names = (self.victim.pid, self._directory, self._abstract, port)
        return f"VICTIM, OUTSIDE, ABSTRACT, PORT = {names!r}\n{PRELUDE}{code}"

    def state(self) -> dict[str, Any]:
        """Return everything that an attempt might change."""
        pid = self.victim.pid
        process: Any = "ended"
        if self.victim.poll() is None:
            stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            limits = [resource.prlimit(pid, kind) for kind in range(16)]
            oom = Path(f"/proc/{pid}/oom_score_adj").read_text()
            condition = "as usual" if stat[0] in "RSDI" else stat[0]  # T: stopped, t: traced, Z and X: ended
            process = (condition, stat[16], stat[37:39], os.sched_getaffinity(pid), limits, oom)
        files = {}
        for path in sorted(Path(self._directory).rglob("*")):
            info = path.lstat()
            text = path.read_text() if path.is_file() else ""
            attributes = os.listxattr(path)
            files[str(path)] = (info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns, text, attributes)
        kinds = ("shm", "msg", "sem")
        return {
            "process": process,
            "files": files,
            "connections": select.select(self._listeners, [], [], 0)[0],
            "ipc": [len(Path(f"/proc/sysvipc/{kind}").read_text().splitlines()) for kind in kinds],
            "shared memory": os.path.exists("/dev/shm/escape"),
            "host": os.uname().nodename,
            "leftovers": [n for n in os.listdir(tempfile.gettempdir()) if n.startswith(("sandbox-", "escape-x"))],
            "own priority": os.getpriority(os.PRIO_PROCESS, 0),
        }

    def close(self) -> None:
        """End the process and the sockets."""
        self.victim.kill()
        self.victim.wait()
        for listener in self._listeners:
            listener.close()


def attempt(outside: Outside, code: str) -> tuple[str, str | None]:
    """Return what the attempt printed, and how it got out, or None."""
    before = outside.state()
    output = sandbox.run_python(outside.program(code), LIMITS)
    after = outside.state()
    if any(word in output for word in ("ESCAPED", "REACHED", SECRET)):
        return output, output
    changed = [f"{name}: {before[name]} -> {after[name]}" for name in before if before[name] != after[name]]
    return output, "; ".join(changed) or None


def all_refused_together(outside: Outside) -> bool:
    """Return whether all attempts but those of ALONE ran to their end in one sandbox and none of them got out."""
    together = {name: code for name, code in ATTEMPTS.items() if name not in ALONE}
    output, how = attempt(outside, ONE_BY_ONE.format(attempts=together))
    return how is None and output.endswith(f"\ntried {len(together)}")


def main() -> None:
    """Try everything and print what got out."""
    os.environ["SECRET"] = SECRET
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    found = sandbox.isolation()
    escaped = {}
    with tempfile.TemporaryDirectory(prefix="escape-") as top:
        os.environ["TMPDIR"] = tempfile.tempdir = str(Path(top, "run"))
        Path(top, "run").mkdir()
        os.chmod(top, 0o755)
        os.chmod(Path(top, "run"), 0o711)
        outside = fresh_outside(top)
        left = ALONE if (is_refused := all_refused_together(outside)) else ATTEMPTS
        if not is_refused:
            outside.close()
            outside = fresh_outside(top)
        for name in left:
            if (how := attempt(outside, ATTEMPTS[name])[1]) is not None:
                escaped[name] = how
                outside.close()
                outside = fresh_outside(top)
        outside.close()
    answer = {"isolation": str(found), "gaps": found.gaps, "user": os.getuid(), "tried": len(ATTEMPTS)}
    sys.stdout.write(json.dumps(answer | {"apart": len(left), "escaped": escaped}) + "\n")


def fresh_outside(top: str) -> Outside:
    """Return a new world outside, in place of what an attempt may have changed."""
    directory = Path(top, "outside")
    subprocess.run(["rm", "-rf", str(directory)], check=True)
    directory.mkdir()
    return Outside(str(directory))


if __name__ == "__main__":
    main()
