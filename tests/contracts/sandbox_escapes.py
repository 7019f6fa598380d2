"""Programs that try to leave the sandbox, by name, and the world outside that is compared before and after each.

Run as a script, by any user: tries every program and prints the ones that got out as JSON, by name. Those that leave
their process as it is are tried one after the other in one sandbox, the others in sandboxes of their own, several at
once; where anything is not as it should be, each of them is tried again alone, which tells which one got out.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nemo_rl.environments import sandbox
from nemo_rl.environments.sandbox_launcher import DEVICES, READABLE

SECRET = "the-trainers-secret"
LIMITS = sandbox.SandboxLimits(cpu_s=20, wall_s=60, memory_bytes=256 * 1024 * 1024, max_output_chars=1 << 20)
NUM_AT_ONCE = 8
ENDED = "not all were tried"
ENDLESS_LIMITS = sandbox.SandboxLimits(cpu_s=1, wall_s=1, memory_bytes=256 * 1024 * 1024)
SHOWN = [*READABLE, *map(os.path.realpath, READABLE), *DEVICES, tempfile.gettempdir()]
ROOT_NAMES = sorted({path.split("/")[1] for path in SHOWN})  # of the private view: the first directory of each path
STRAYS = [
    f"{directory}/escape{end}" for directory in ("/dev/shm", "/tmp", "/var/tmp", "/dev/mqueue") for end in ("", "-x")
]
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
def fill(name, size=4 << 20):
    with open(name, 'wb') as file:
        return file.write(bytes(size))
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
    "vfork": (58, None, ""),
    "clone as vfork": (56, 220, "0x4111, 0, 0, 0, 0"),
    "clone3 into namespaces": (435, 435, "(0x30000000).to_bytes(8, 'little') + bytes(80), 88"),
    "execveat by a descriptor": (322, 281, "os.open('/usr/bin/env', os.O_RDONLY), '', 0, 0, 0x1000"),
    "wait4": (61, 260, "-1, 0, 1, 0"),
    "waitid": (247, 95, "0, 0, buffer, 5, 0"),
    "a number with high bits": (57 | 1 << 32, 220 | 1 << 32, "17, 0, 0, 0, 0"),
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
    "ptrace by the parent": (101, 117, "0, 0, 0, 0"),
    "sched_getscheduler of another": (145, 120, "VICTIM"),
    "sched_getparam of another": (143, 121, "VICTIM, buffer"),
    "sched_getattr of another": (315, 275, "VICTIM, buffer, 48, 0"),
    "ioprio_get of another": (252, 31, "1, VICTIM"),
    "get_mempolicy": (239, 236, "buffer, 0, 0, 0, 0"),
    "set_mempolicy": (238, 237, "0, 0, 0"),
    "mbind": (237, 235, "0, 4096, 0, 0, 0, 0"),
    "remap_file_pages": (216, 234, "0, 4096, 0, 0, 0"),
    "process_vm_readv of itself": (310, 270, "os.getpid(), buffer, 0, buffer, 0, 0"),
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
    "listen": (50, 201, "0, 1"),
    "accept4": (288, 242, "0, 0, 0, 0"),
    "recvmsg": (47, 212, "0, buffer, 0"),
    "sendmmsg": (307, 269, "0, buffer, 1, 0"),
    "setsockopt": (54, 208, "0, 1, 2, buffer, 4"),
    "io_submit": (209, 2, "0, 0, 0"),
    "fanotify_mark": (301, 263, "0, 1, 2, -100, '/'"),
    "inotify_add_watch": (254, 27, "0, OUTSIDE, 2"),
    "memory of a signal by signalfd": (282, None, "-1, buffer, 8"),
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
    "shmctl": (31, 195, "0, 14, buffer"),
    "msgsnd": (69, 189, "0, buffer, 1, 0"),
    "msgctl": (71, 187, "0, 12, buffer"),
    "semctl": (66, 191, "0, 0, 19, buffer"),
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
    "listxattr": (194, 11, "OUTSIDE + '/victim', buffer, 100"),
    "creat": (85, None, "OUTSIDE + '/new', 0o666"),
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
    "tee": (276, 77, "0, 1, 1, 0"),
    "vmsplice": (278, 75, "1, buffer, 1, 0"),
    "sync_file_range": (277, 84, "1, 0, 0, 7"),
    "syncfs": (306, 267, "1"),
    "statfs": (137, 43, "'/', buffer"),
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
    "fspick": (433, 433, "-100, '/', 0"),
    "fsmount": (432, 432, "0, 0, 0"),
    "listmount": (458, 458, "buffer, buffer, 8, 0"),
    "statmount": (457, 457, "buffer, buffer, 4096, 0"),
    "swapon": (167, 224, "'swap', 0"),
    "quotactl_fd": (443, 443, "0, 0, 0, 0"),
    "kexec_file_load": (320, 294, "0, 0, 0, 0, 0"),
    "clock_adjtime": (305, 266, "0, buffer"),
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
    "setreuid": (113, 145, "0, 0"),
    "setresgid": (119, 149, "0, 0, 0"),
    "setfsgid": (123, 152, "0"),
    "prctl strict seccomp": (157, 167, "22, 1, 0, 0, 0"),
    "prctl of its memory map": (157, 167, "35, 8, 4096, 0, 0"),
    "prctl of ambient capabilities": (157, 167, "47, 2, 21, 0, 0"),
    "prctl as a subreaper": (157, 167, "36, 1, 0, 0, 0"),
    "lsm_set_self_attr": (460, 460, "100, buffer, 32, 0"),
    "landlock_restrict_self": (446, 446, "0, 0"),
    "landlock_create_ruleset": (444, 444, "0, 0, 1"),
    "x32 getpid": (0x40000000 + 39, None, ""),
    "x32 execve": (0x40000000 + 520, None, "'/bin/true', 0, 0"),
}
CALLS_PRELUDE = "ACL = b''.join(x.to_bytes(n, 'little') for x, n in ((2, 4), (1, 2), (6, 2), (0xFFFFFFFF, 4)))\n"

# Programs that leave their process as it is.
PROGRAMS: dict[str, str] = {
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
    "environment variables": "print(dict(os.environ))",
    "libc's system": "libc.system(b'true') == 0 and print(OUT)",
    "libc's popen": "libc.popen.restype = ctypes.c_void_p; libc.popen(b'true', b'r') and print(OUT)",
    "libc's wordexp": "libc.wordexp(b'$(true)', ctypes.create_string_buffer(64), 0) == 0 and print(OUT)",
    "libc's pthread_create": "libc.pthread_create(buffer, 0, libc.getpid, 0) == 0 and print(OUT)",
    "_thread": "import _thread; print(OUT, _thread.start_new_thread(print, ()))",
    "pty.fork": "import pty; print(OUT, pty.fork())",
    "asyncio subprocess": "import asyncio; asyncio.run(asyncio.create_subprocess_exec('/bin/true')); print(OUT)",
    "process pool": "import concurrent.futures as c; c.ProcessPoolExecutor(1).submit(print).result(); print(OUT)",
    "its own memory by /proc": "write('/proc/self/mem', os.O_RDWR)",
    "its own files in /proc": """
for name in ('environ', 'maps', 'status', 'auxv', 'cmdline', 'mounts', 'limits'):
    read('/proc/self/' + name)
listing('/proc/self/fd'); listing('/proc/self/task'); listing('/dev/fd')""",
    "changes of itself by /proc": """
for name in ('oom_score_adj', 'coredump_filter', 'timerslack_ns', 'uid_map', 'setgroups', 'clear_refs', 'attr/current'):
    write('/proc/self/' + name)""",
    "the machine in /proc": """
for name in ('meminfo', 'cpuinfo', 'mounts', 'net/tcp', 'net/unix', 'keys', 'sysvipc/shm', 'sched_debug', 'kcore'):
    read('/proc/' + name)""",
    "the first process": "read('/proc/1/environ'); read('/proc/1/maps'); read('/proc/1/root/etc/passwd')",
    "the system's directories": "[listing(path) for path in ('/etc', '/boot', '/sys', '/proc', '/run', '/dev/shm')]",
    "climb out of the installation": "import sys; read(sys.prefix + '/..' * 20 + '/etc/passwd')",
    "climb by descriptors": """
here = os.open('/usr', os.O_PATH | os.O_DIRECTORY)
for _ in range(9):
    here = os.open('..', os.O_PATH | os.O_DIRECTORY, dir_fd=here)
for path, flags in ((b'etc/passwd', os.O_RDONLY), ((OUTSIDE + '/open')[1:].encode(), os.O_WRONLY)):
    report(libc.openat(here, path, flags))""",
    "whether a file outside exists": "IS_CLOSED and os.path.exists(OUTSIDE + '/secret') and print(OUT)",
    "the machine's sockets": """
write('/run/docker.sock'); write('/var/run/docker.sock'); write('/run/dbus/system_bus_socket')""",
    "virtual devices": """
for name in ('userfaultfd', 'net/tun', 'vhost-net', 'uinput', 'snapshot', 'vfio/vfio', 'dri/card0', 'nvidia0', 'port'):
    write('/dev/' + name, os.O_RDWR)""",
    "the machine's entropy": "report(libc.ioctl(os.open('/dev/urandom', os.O_RDONLY), 0x5204, 0))",
    "a pseudo terminal": "import pty; print(OUT, pty.openpty())",
    "shared memory by Python": """
from multiprocessing import shared_memory as m; print(OUT, m.SharedMemory('escape', True, 9))""",
    "shared memory by libc": "report(libc.shm_open(b'/escape', 0o102, 0o666))",
    "a semaphore by libc": """
libc.sem_open.restype = ctypes.c_void_p; libc.sem_open(b'/escape', 0o100, 0o666, 1) and print(OUT)""",
    "a queue by libc": "report(libc.mq_open(b'/escape', 0o102, 0o666, 0))",
    "inotify by libc": "report(libc.inotify_init())",
    "files by stdio": """
libc.fopen.restype = ctypes.c_void_p; libc.fopen((OUTSIDE + '/new').encode(), b'w') and print(OUT)""",
    "files by a database": "import sqlite3; sqlite3.connect(OUTSIDE + '/db').execute('create table t (x)'); print(OUT)",
    "files by readline": "import readline; readline.write_history_file(OUTSIDE + '/history')",
    "files by a key log": "import ssl; ssl.create_default_context().keylog_filename = OUTSIDE + '/keys'",
    "files by logging": "import logging; logging.FileHandler(OUTSIDE + '/log'); print(OUT)",
    "files by an archive": """
import io, tarfile
data = io.BytesIO()
with tarfile.open(fileobj=data, mode='w') as tar:
    for name in ('../escape-x', OUTSIDE + '/new'):
        tar.addfile(tarfile.TarInfo(name), io.BytesIO())
data.seek(0)
tarfile.open(fileobj=data).extractall('.')""",
    "a fifo by libc": "report(libc.mkfifo(b'fifo', 0o666))",
    "users of the machine": "libc.getpwuid.restype = ctypes.c_void_p; IS_CLOSED and libc.getpwuid(0) and print(OUT)",
    "environment by libc": """
environ, n = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, 'environ'), 0
while environ[n]:
    print(environ[n]); n += 1""",
    "frames of the launcher": """
import sys
frame = sys._getframe()
while frame:
    print([frame.f_locals.get(name) for name in ('settings', 'held', 'tree', 'args')], sys.orig_argv)
    frame = frame.f_back""",
    "the launcher's functions": """
import __main__ as launcher, resource
settings = {'cpu_s': 99, 'memory_bytes': 1 << 40, 'file_bytes': 1 << 40, 'wall_s': 999, 'user_id': 0, 'without': []}
launcher.set_limits(settings)
launcher.become_unprivileged(libc, 0, is_visible=True)
report(-1 if resource.getrlimit(resource.RLIMIT_FSIZE)[1] < 1 << 30 else 0, 1)""",
    "resource limits raised": """
import resource
for kind in range(16):
    try:
        resource.setrlimit(kind, (-1, -1)); print(OUT, kind)
    except (OSError, ValueError):
        pass""",
    "hard links": """
open('linked', 'w').close()
for name in ('link', os.path.join('..', 'escape-x'), OUTSIDE + '/link'):
    report(libc.link(b'linked', name.encode()))""",
    "its directory moved": """
for other in ('-x', '/../escape-x'):
    libc.rename(os.getcwd().encode(), (os.getcwd() + other).encode()) == 0 and print(OUT)
libc.rmdir(os.getcwd().encode()) == 0 and print(OUT)""",
    "a whiteout": """
open('white', 'w').close()
number = 316 if os.uname().machine == 'x86_64' else 276
libc.syscall(number, -100, b'white', -100, b'out', 4)""",
    "a file with set user id": "os.close(os.open('set', os.O_CREAT | os.O_WRONLY, 0o6777))",
    "a core file": "import resource; print(resource.getrlimit(resource.RLIMIT_CORE)[1] and OUT)",
}
# Programs that use up, end or change their process, or look at what it has open.
ALONE: dict[str, str] = {
    "signal by an asynchronous pipe": """
import fcntl
r, w = os.pipe()
for command, value in ((8, VICTIM), (10, 9), (4, 0o20000 | os.O_NONBLOCK)):
    libc.fcntl(r, command, value)
os.write(w, b'x')""",
    "audit hook replaced": "import sys; sys.addaudithook(lambda *a: None); os.system('true') == 0 and print(OUT)",
    "inherited descriptors": """
for descriptor in range(3, 64):
    try:
        os.fstat(descriptor); print(OUT, descriptor)
    except OSError:
        pass""",
    "more memory than allowed": "x = bytearray(1 << 29); print(OUT)",
    "more files than allowed": "x = [open('/dev/null') for _ in range(65)]; print(OUT)",
    "a file larger than allowed": "open('big', 'wb').write(bytes(8 << 20)) > (4 << 20) and print(OUT)",
    "nested directories": "for _ in range(1500): libc.mkdir(b'd', 0o777); libc.chdir(b'd')",
    "directories without access": "os.mkdir('a', 0o300); os.mkdir('a/b', 0o0); os.mkdir('c', 0)",
    "names that are no text": "os.mkdir(b'\\xff\\xfe'); open(b'\\xff\\xfe/\\n\\xff', 'w')",
    "names that the clean-up may use": """
at = os.path.basename(os.getcwd())
for n in range(9):
    for name in (f'{at}-{n}', f'{at}{n}', f'{n}', f'.{n}', f'tmp{n}', f'{n:08x}'):
        os.makedirs(name + '/x/y/z'); fill(name + '/x/y/f', 1 << 16)""",
    "names of one byte": "for n in range(1, 256): n in (46, 47) or libc.mkdir(bytes([n]), 0o700)",
    "names of 255 bytes": """
for n in range(200): fill(f'{n:03d}' + 'x' * 252, 1 << 12); os.mkdir(f'{n:03d}' + 'y' * 252)""",
    "names of lone surrogates": """
os.mkdir('\\udcff\\udc80'); fill('\\udcff\\udc80/\\udcfe\\n', 1 << 20); os.listdir('.')""",
    "4,000 nested directories of long names": """
for _ in range(4000): libc.mkdir(b'd' * 200, 0o700); libc.chdir(b'd' * 200)""",
    "nested directories without access": "for _ in range(500): libc.mkdir(b'n', 0o300); libc.chdir(b'n')",
    "directories without access under a mask": """
os.umask(0o777); os.mkdir('m'); os.mkdir('l'); os.close(os.open('k', os.O_CREAT))""",
    "a working directory that is removed": """
os.mkdir('w'); os.chdir('w'); os.rmdir('../w'); libc.open(b'x', 0o101, 0o600)""",
    "fill its directory": "print(total := sum(fill(str(n)) for n in range(64))); IS_CLOSED and print(OUT)",
    "fill its directory by mapped files": """
import mmap
for n in range(64):
    with open(str(n), 'wb+') as file:
        file.truncate(4 << 20)
        mmap.mmap(file.fileno(), 4 << 20).write(bytes(4 << 20))
IS_CLOSED and print(OUT)""",
    "fill unnamed files": """
kept = [os.open('.', os.O_RDWR | os.O_TMPFILE) for _ in range(50)]
[os.write(each, bytes(4 << 20)) for each in kept]
IS_CLOSED and print(OUT)""",
    "fill removed files": """
for n in range(50):
    os.write(os.open('r', os.O_CREAT | os.O_WRONLY), bytes(4 << 20)); os.unlink('r')
IS_CLOSED and print(OUT)""",
    "many small files": "[fill(str(n), 1) for n in range(5000)]; COUNTS_FILES and print(OUT)",
    "many directories": "[os.mkdir(str(n)) for n in range(5000)]; COUNTS_FILES and print(OUT)",
    "sparse files": """
for size in (1 << 40, 1 << 33, (4 << 20) + 1):
    with open('sparse', 'wb') as file:
        try:
            os.ftruncate(file.fileno(), size); print(OUT)
        except OSError:
            os.lseek(file.fileno(), size, 0); libc.write(file.fileno(), b'x', 1) > 0 and print(OUT)""",
    "a sparse output": """
libc.ftruncate(1, ctypes.c_long(1 << 40)) == 0 and print(OUT)
os.lseek(1, 1 << 40, 0); libc.write(1, b'x', 1) > 0 and print(OUT)
os.lseek(1, (4 << 20) - 1, 0); libc.write(1, b'x', 1)""",
    "O_DIRECT on the output": """
print('begun', flush=True); report(libc.fcntl(1, 4, os.O_DIRECT)); report(libc.fcntl(2, 4, os.O_DIRECT))""",
    "O_DIRECT on the input": "report(libc.fcntl(0, 4, os.O_DIRECT))",
    "flags of the output": """
print('begun', flush=True); libc.fcntl(1, 4, os.O_NONBLOCK | os.O_APPEND); libc.fcntl(0, 4, os.O_NONBLOCK)""",
    "an output that is cut and rewound": """
print('x' * 9999, flush=True); os.ftruncate(1, 0); os.lseek(1, 5000, 0); os.write(2, b'\\xff\\xfe')""",
    "an output that is read": "print('x', flush=True); print(os.pread(1, 999, 0)); print(os.read(0, 999))",
    "an output of lone surrogates": """
import sys; sys.stdout.buffer.write(b'\\xed\\xa0\\x80\\xff\\x00'); print('\\ud800')""",
    "an output of terminal escapes": """
print('\\x1b]0;x\\x07\\x1b[2J\\x1b]52;c;eA==\\x07\\x1bP\\x9b6n\\r\\x08\\x00' * 99)""",
    "closed descriptors": "os.closerange(0, 64); libc.open(b'new', 0o102, 0o600); libc.write(1, b'x', 1)",
    "a crash": "ctypes.string_at(0)",
    "an abort": "libc.abort()",
    "signals to itself": """
import signal; [libc.kill(os.getpid(), n) for n in (19, 20, 11)]; signal.raise_signal(signal.SIGKILL)""",
    "an end by os._exit": "os._exit(137)",
    "an end with handlers left": "import atexit, sys; atexit.register(os.system, 'true'); sys.exit('x' * 9999)",
    "deep recursion": "import sys; sys.setrecursionlimit(10**4); f = lambda n: f(n + 1)\nf(0)",
}
# Programs that never end by themselves, in little time each.
ENDLESS: dict[str, str] = {
    "a loop": "while True: pass",
    "a loop that ignores its limit": "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
    "a sleep": "import time; time.sleep(999); print(OUT)",
    "a sleep without its alarm": """
import signal, time; signal.setitimer(signal.ITIMER_REAL, 0); time.sleep(999); print(OUT)""",
    "a sleep that ignores its alarm": """
import signal, time; signal.signal(14, signal.SIG_IGN); time.sleep(999); print(OUT)""",
    "a sleep without signals": """
import signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals()); time.sleep(999); print(OUT)""",
    "a wait for itself": "reader, writer = os.pipe(); os.read(reader, 1); print(OUT)",
    "a regular expression": "import re; re.match('(a+)+$', 'a' * 50 + 'b'); print(OUT)",
    "a power tower": "x = 9**9**9; print(OUT)",
    "a flood of output": "while True: print('x' * 9999)",
    "a flood of errors": "while True: os.write(2, b'\\x1b' * 65536)",
    "a flood that rewinds": "while True: os.write(1, bytes(1 << 20)); os.lseek(1, 0, 0)",
}
if platform.machine() == "x86_64":
    ALONE["32-bit system call"] = """
import mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex('5389c0b814000000cd805bc3'))  # getpid by int 0x80
report(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))(), 1)"""
    ALONE["machine code that forks"] = """
import mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex('b8390000000f05c3'))
report(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))(), 1)"""

TOGETHER = PROGRAMS | {
    name: f"{CALLS_PRELUDE}call({x86}, {arm}, {arguments})" for name, (x86, arm, arguments) in CALLS.items()
}
ATTEMPTS = TOGETHER | ALONE | ENDLESS
# Attempts on files, which only Landlock, a private view or bubblewrap holds back.
ON_FILES = {
    "append",
    "changes of itself by /proc",
    "climb by descriptors",
    "climb out of the installation",
    "create",
    "create after chdir",
    "create beside its directory",
    "create by a climbing path",
    "create through /proc/self/cwd",
    "create through /proc/self/root",
    "files by a database",
    "files by a key log",
    "files by readline",
    "files by stdio",
    "its directory moved",
    "its own files in /proc",
    "its own memory by /proc",
    "list other sandboxes",
    "list the root",
    "list the trainer's files",
    "mkdirat outside",
    "open a new terminal",
    "open fuse",
    "open kvm",
    "open the GPU",
    "open the terminal",
    "read /etc/passwd",
    "read /proc/kallsyms",
    "read /proc/self/mountinfo",
    "read /proc/version",
    "read a file of the trainer",
    "read the parent's environment",
    "read the trainer's command line",
    "read the trainer's environment",
    "read the trainer's memory",
    "read through the trainer's descriptors",
    "read through the trainer's root",
    "renameat2 into the sandbox",
    "renameat2 outside",
    "rmdir outside",
    "shared memory by Python",
    "shared memory by libc",
    "the first process",
    "the machine in /proc",
    "the system's directories",
    "truncate on opening",
    "unlinkat outside",
    "unnamed file outside",
    "users of the machine",
    "virtual devices",
    "write",
    "write the trainer's memory",
    "write the trainer's name",
    "write the trainer's oom score",
    "write to /dev/shm",
    "write to /tmp",
    "write to /var/tmp",
}
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

    def __init__(self, directory: str, isolation: sandbox.Isolation) -> None:
        os.chmod(directory, 0o777)
        self._isolation = isolation
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
        found = self._isolation
        names = {
            "VICTIM": self.victim.pid,
            "OUTSIDE": self._directory,
            "ABSTRACT": self._abstract,
            "PORT": port,
            "IS_CLOSED": found.view or found.bubblewrap is not None,  # to files outside; its own are bounded
            "COUNTS_FILES": found.view,
        }
        return f"globals().update({names!r})\n{PRELUDE}{code}"

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
            "strays": [path for path in STRAYS if os.path.lexists(path)],
            "host": os.uname().nodename,
            "leftovers": sorted(os.listdir(tempfile.gettempdir())),
            "children": sorted(Path("/proc/self/task", str(os.getpid()), "children").read_text().split()),
            "mounts": Path("/proc/self/mounts").read_text(),
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
    output = run(outside, code, LIMITS)
    return output, has_got_out(output) or describe_changes(before, outside.state())


def run(outside: Outside, code: str, limits: sandbox.SandboxLimits) -> str:
    """Return what an attempt printed, or the error that it raised in the trainer."""
    try:
        return sandbox.run_python(outside.program(code), limits)
    except Exception as error:
        return f"ESCAPED: raised in the trainer: {error!r}"


def has_got_out(output: str) -> str | None:
    """Return the output if it says so."""
    return output if any(word in output for word in ("ESCAPED", "REACHED", SECRET)) else None


def describe_changes(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Return what has changed outside, or None."""
    return (
        "; ".join(f"{name}: {before[name]} -> {after[name]}" for name in before if before[name] != after[name]) or None
    )


def try_together(outside: Outside, attempts: dict[str, str]) -> str | None:
    """Try all these in one sandbox; return how one got out, or what one of them ended, or None."""
    output, how = attempt(outside, ONE_BY_ONE.format(attempts=attempts))
    return how or (None if output.endswith(f"\ntried {len(attempts)}") else f"{ENDED}: {output[-200:]}")


def try_at_once(outside: Outside, attempts: dict[str, str]) -> str | None:
    """Try each of these in a sandbox of its own, several at once; return how one got out, or None."""
    before = outside.state()
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        outputs = list(pool.map(lambda code: run(outside, code, LIMITS), attempts.values()))
    return next(filter(None, map(has_got_out, outputs)), None) or describe_changes(before, outside.state())


def try_alone(top: str, found: sandbox.Isolation, attempts: dict[str, str]) -> dict[str, str]:
    """Return how each of these that got out did so."""
    escaped = {}
    outside = fresh_outside(top, found)
    for name, code in attempts.items():
        _, how = attempt(outside, code)
        if how is not None:
            escaped[name] = how
            outside.close()
            outside = fresh_outside(top, found)
    outside.close()
    return escaped


def try_endless(outside: Outside) -> dict[str, str]:
    """Return how programs of ENDLESS, all running at once, got out."""
    before = outside.state()
    with ThreadPoolExecutor(len(ENDLESS)) as pool:
        outputs = pool.map(lambda code: run(outside, code, ENDLESS_LIMITS), ENDLESS.values())
        escaped = {name: how for name, output in zip(ENDLESS, outputs, strict=True) if (how := has_got_out(output))}
    changes = describe_changes(before, outside.state())
    return escaped | ({"one of the endless programs": changes} if changes else {})


def main() -> None:
    """Try everything and print what got out."""
    os.environ["SECRET"] = SECRET
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    sandbox.STARTUP_GRACE_S = 2.0  # waited for by those that outlive their alarm
    found = sandbox.isolation()
    with tempfile.TemporaryDirectory(prefix="escape-") as top:
        os.environ["TMPDIR"] = tempfile.tempdir = str(Path(top, "run"))
        Path(top, "run").mkdir()
        os.chmod(top, 0o755)
        os.chmod(Path(top, "run"), 0o711)
        together = TOGETHER if has_file_layer(found) else {k: v for k, v in TOGETHER.items() if k not in ON_FILES}
        escaped: dict[str, str] = {}
        tries = ((try_together, together), (try_at_once, ALONE))
        for try_all, attempts in tries:
            outside = fresh_outside(top, found)
            how = try_all(outside, attempts)
            outside.close()
            if how is not None:
                alone = try_alone(top, found, attempts)
                escaped |= alone or ({} if how.startswith(ENDED) else {f"one of {len(attempts)}": how})
        outside = fresh_outside(top, found)
        escaped |= try_endless(outside)
        outside.close()
        remove_strays()
    tried = len(together) + len(ALONE) + len(ENDLESS)
    answer = {"isolation": str(found), "gaps": found.gaps, "user": os.getuid(), "tried": tried, "escaped": escaped}
    sys.stdout.write(json.dumps(answer) + "\n")


def has_file_layer(found: sandbox.Isolation) -> bool:
    """Return whether something holds back attempts on files."""
    return bool(found.landlock or found.view or found.bubblewrap)


def remove_strays() -> None:
    """Remove what an attempt that got out has made."""
    for path in STRAYS:
        if os.path.lexists(path):
            subprocess.run(["rm", "-rf", path], check=True)


def fresh_outside(top: str, isolation: sandbox.Isolation) -> Outside:
    """Return a new world outside, in place of what an attempt may have changed."""
    remove_strays()
    directory = Path(top, "outside")
    subprocess.run(["rm", "-rf", str(directory)], check=True)
    directory.mkdir()
    return Outside(str(directory), isolation)


if __name__ == "__main__":
    main()
