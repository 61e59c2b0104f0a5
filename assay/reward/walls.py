"""The walls of a sandbox, as arguments of bwrap: what is mounted, which namespaces are its own, what its environment says."""

import functools
import os
import sys
import sysconfig
from pathlib import Path

NOBODY = 65534


def bwrap_arguments(disk_bytes: int, *, as_root: bool) -> list[str]:
    """As root we keep the right to become somebody else, and inside.py uses it; anyone else gets a user namespace.

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
