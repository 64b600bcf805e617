"""An output that a user names goes where its link leads, and takes no device's place."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from tidegate.storage.atomic_file import write_atomically
from tidegate.storage.output_file import OutputFile


@click.command()
@click.option("-o", "output", type=OutputFile())
def written(output: Path) -> None:
    write_atomically(output, b"new")


def no_file(path: Path, kind: str) -> Path:
    """Make what is no regular file; a pipe stands for a device, which only root can make."""
    if kind == "pipe":
        os.mkfifo(path)
    else:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(path))
    return path


@pytest.mark.parametrize("kind", ["pipe", "socket"])
@pytest.mark.parametrize("is_link", [False, True])
def test_what_is_no_regular_file_is_refused_and_stays(tmp_path: Path, kind: str, is_link: bool) -> None:
    device = no_file(tmp_path / "d", kind)
    named = tmp_path / "link" if is_link else device
    if is_link:
        named.symlink_to(device)

    result = CliRunner().invoke(written, ["-o", str(named)])

    assert result.exit_code == 2 and f"{named}: is no regular file" in result.output
    assert not device.is_file() and named.is_symlink() is is_link
    assert len(os.listdir(tmp_path)) == 1 + is_link
    with pytest.raises(OSError, match="is no regular file"):
        write_atomically(device, b"by code that did not ask")
    assert not device.is_file()


@pytest.mark.parametrize("exists", [False, True])
def test_a_link_is_followed_to_its_target_and_stays_a_link(tmp_path: Path, exists: bool) -> None:
    target, link = tmp_path / "disk" / "real", tmp_path / "link"
    target.parent.mkdir()
    if exists:
        target.write_bytes(b"old")
    (tmp_path / "second").symlink_to("disk/real")
    link.symlink_to("second")

    assert CliRunner().invoke(written, ["-o", str(link)]).exit_code == 0

    assert link.is_symlink() and target.read_bytes() == b"new" == link.read_bytes()


def test_a_link_that_leads_to_itself_is_an_error_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    result = CliRunner().invoke(written, ["-o", str(tmp_path / "loop")])
    assert result.exit_code == 2 and "symbolic links" in result.output
