"""What dpkg runs as root on a device, against what the agent's user may have put into its own folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.containers import ROOT

PRERM = ROOT / "deploy" / "debian" / "prerm.edge"
USER, GROUP = "tidegate:x:987:987::/var/lib/tidegate:/usr/sbin/nologin\n", "tidegate:x:987:\n"
# In a file system of its own, where /var/lib and the users are those of a device.
DEVICE = """
mount -t tmpfs tmpfs /var/lib && mount --bind "$1/passwd" /etc/passwd && mount --bind "$1/group" /etc/group
mkdir -p /var/lib/tidegate/state && chown -R 987:987 /var/lib/tidegate
echo whole >/var/lib/others
cd /var/lib/tidegate/state
eval "$2"
sh -e "$3" "$4" 0.3.0
cp /var/lib/others "$1/others"
[ ! -f leaving ] || { cp leaving "$1/leaving" && stat -c %u leaving >"$1/owner"; }
"""


def _may_mount() -> bool:
    tools = all(shutil.which(one) for one in ("unshare", "setpriv", "timeout"))
    return tools and os.geteuid() == 0 and subprocess.run(["unshare", "--mount", "true"], check=False).returncode == 0


pytestmark = pytest.mark.skipif(not _may_mount(), reason="needs root, and a mount namespace")


def removed(folder: Path, there: str, *, event: str = "upgrade", user: bool = True) -> None:
    """Run the script on a device in whose state folder the agent's user has done something."""
    for name, line in (("passwd", USER), ("group", GROUP)):
        (folder / name).write_text(Path("/etc", name).read_text() + (line if user else ""))
    command = ["unshare", "--mount", "sh", "-ec", DEVICE, "sh", str(folder), there, str(PRERM), event]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"an upgrade would fail: {done.stdout}{done.stderr}"


def test_an_upgrade_leaves_the_agents_word_in_the_agents_name(tmp_path: Path) -> None:
    removed(tmp_path, "")
    assert ((tmp_path / "leaving").read_text(), (tmp_path / "owner").read_text()) == ("update\n", "987\n")


def test_a_link_in_the_agents_folder_does_not_lead_root_anywhere(tmp_path: Path) -> None:
    removed(tmp_path, "ln -s /var/lib/others leaving")
    assert (tmp_path / "others").read_text() == "whole\n"


@pytest.mark.slow
def test_a_pipe_that_nobody_reads_does_not_stop_an_upgrade(tmp_path: Path) -> None:
    removed(tmp_path, "mkfifo leaving && chown 987:987 leaving")


def test_without_its_user_or_its_folder_a_package_is_upgraded_all_the_same(tmp_path: Path) -> None:
    removed(tmp_path, "", user=False)
    removed(tmp_path, "rmdir ../state; cd ..")


def test_only_an_upgrade_is_called_one(tmp_path: Path) -> None:
    removed(tmp_path, "", event="remove")
    assert not (tmp_path / "leaving").exists()


def test_the_package_has_the_script() -> None:
    builder = (ROOT / "deploy" / "debian" / "build.sh").read_text()
    assert f"cat deploy/debian/{PRERM.name} >>" in builder
