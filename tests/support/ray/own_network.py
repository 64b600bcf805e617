"""A network and a PID namespace of its own for all that Ray starts, since Ray takes ports and listens everywhere."""

from __future__ import annotations

import os
import shutil
import subprocess

from tests.support.ray.node import PYTHON


def in_own_network() -> list[str] | None:
    """What begins a command that runs with the loopback alone; None where the kernel or the account does not let.

    Whatever the command leaves behind ends with it, also where it is killed.
    """
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return None
    alone = ["unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
    alone += ["sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    tried = subprocess.run([*alone, "true"], capture_output=True, check=False)
    return alone if tried.returncode == 0 and PYTHON.is_file() else None
