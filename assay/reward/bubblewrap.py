"""Bubblewrap arguments and seccomp filter of a sandbox: mounts, namespaces, environment, denied system calls.

The filter is classic BPF: the system calls that a sandboxed program is denied, and the socket families it may open. Numbers are of
the kernel's tables for x86-64 and arm64 (arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h).
"""

import errno
import functools
import os
import platform
import struct
import sys
import sysconfig
from pathlib import Path

NOBODY = 65534


def bwrap_arguments(disk_bytes: int, *, as_root: bool) -> list[str]:
    """Arguments of bwrap. As root we keep the right to become somebody else, and sandbox_process.py uses it; anyone else gets a user
    namespace.

    Root in a user namespace would still be root to the kernel where it counts processes, and exempt from RLIMIT_NPROC.
    """
    user = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if as_root else \
        ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    namespaces = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]
    files = [*_libraries(), "--dev", "/dev", "--remount-ro", "/dev", "--perms", "1777", "--size", str(disk_bytes), "--tmpfs", "/tmp",
             "--remount-ro", "/", "--chdir", "/tmp"]
    environment = ["--clearenv", "--setenv", "PATH", "/python/bin", "--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8",
                   "--setenv", "LD_LIBRARY_PATH", "/python/lib", "--setenv", "OMP_NUM_THREADS", "1"]
    return [*user, *namespaces, "--die-with-parent", "--new-session", *files, *environment]


@functools.cache
def _libraries() -> tuple[str, ...]:
    """The interpreter under a name that says nothing about this machine, and what it is linked against."""
    prefix, stdlib = Path(sys.base_prefix), Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix}))
    interpreter = Path(os.path.realpath(sys.executable))
    binds = [part for folder in ("/python", "/python/bin", "/usr", "/etc") for part in ("--perms", "0755", "--dir", folder)]
    binds += ["--ro-bind", str(interpreter), "/python/bin/python"]
    for folder in ("lib", "lib64"):
        if (prefix / folder).is_dir():
            binds += ["--ro-bind", str(prefix / folder), f"/python/{folder}"]
    for packages in ("site-packages", "dist-packages"):
        if (stdlib / packages).is_dir():
            hidden = f"/python/{(stdlib / packages).relative_to(prefix)}"
            binds += ["--tmpfs", hidden, "--remount-ro", hidden]
    for folder in ("/usr/lib", "/usr/lib64", "/usr/lib32"):
        if Path(folder).is_dir():
            binds += ["--ro-bind", folder, folder]
    for folder in ("/lib", "/lib64"):
        if Path(folder).is_symlink():
            binds += ["--symlink", os.readlink(folder), folder]
        elif Path(folder).is_dir():
            binds += ["--ro-bind", folder, folder]
    return (*binds, "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache")


# Denied: looking into other processes, new namespaces and mounts, the kernel's own interfaces, and memory that no limit
# counts (memfd, System V shared memory, message queues).
COMMON = {"pidfd_getfd": 438, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
          "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442, "memfd_secret": 447}
X86_64 = COMMON | {
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "unshare": 272, "setns": 308, "mount": 165,
    "umount2": 166, "pivot_root": 155, "chroot": 161, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "add_key": 248,
    "request_key": 249, "keyctl": 250, "kexec_load": 246, "init_module": 175, "finit_module": 313, "delete_module": 176,
    "open_by_handle_at": 304, "memfd_create": 319, "shmget": 29, "shmat": 30, "semget": 64, "msgget": 68, "mq_open": 240,
    "syslog": 103}
ARM64 = COMMON | {
    "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "unshare": 97, "setns": 268, "mount": 40,
    "umount2": 39, "pivot_root": 41, "chroot": 51, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "add_key": 217,
    "request_key": 218, "keyctl": 219, "kexec_load": 104, "init_module": 105, "finit_module": 273, "delete_module": 106,
    "open_by_handle_at": 265, "memfd_create": 279, "shmget": 194, "shmat": 196, "semget": 190, "msgget": 186, "mq_open": 180,
    "syslog": 116}
MACHINES = {"x86_64": (0xC000003E, X86_64, {"clone": 56, "clone3": 435, "socket": 41}),
            "aarch64": (0xC00000B7, ARM64, {"clone": 220, "clone3": 435, "socket": 198})}
_FAMILIES = (1, 2, 10)  # unix, inet, inet6: the network namespace is empty; a vsock would pass it by
NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*: user, pid, net, ipc, uts, cgroup, mount

LOAD, _EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000


def filter_program(machine: str | None = None) -> bytes | None:
    """Seccomp filter for bwrap's --seccomp; None on a machine whose numbers we do not know."""
    if (machine or platform.machine()) not in MACHINES:
        return None
    architecture, denied, special = MACHINES[machine or platform.machine()]
    lines = [(LOAD, 0, 0, ARCHITECTURE), (_EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, _NUMBER),
             (AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]  # x32: the same calls by other numbers
    for number in denied.values():
        lines += [(_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE | errno.EPERM)]
    # clone3 hides its flags behind a pointer; told that there is none, libc falls back on clone
    lines += [(_EQUAL, 0, 1, special["clone3"]), (RETURN, 0, 0, REFUSE | errno.ENOSYS)]
    lines += [(_EQUAL, 0, 4, special["clone"]), (LOAD, 0, 0, FIRST_ARGUMENT), (ANY_BIT, 0, 1, NEW_NAMESPACES),
              (RETURN, 0, 0, REFUSE | errno.EPERM), (RETURN, 0, 0, ALLOW)]
    lines += [(_EQUAL, 0, 2 + len(_FAMILIES), special["socket"]), (LOAD, 0, 0, FIRST_ARGUMENT),
              *((_EQUAL, len(_FAMILIES) - i, 0, family) for i, family in enumerate(_FAMILIES)),
              (RETURN, 0, 0, REFUSE | errno.EAFNOSUPPORT), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)
