"""What is converted for a repository on a full disk is an error that names the file, and not the end of the process."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.full_disk import small_disk

pytestmark = pytest.mark.slow

EXPORT = """
import sys
from pathlib import Path
import torch
from tidegate.tools.build.convert.export import export_program

module, example = torch.nn.Linear(256, 256).eval(), {"input": torch.zeros(1, 256)}
try:
    export_program(module, example, {"input": {}}, Path(sys.argv[1]), most={})
except OSError as error:
    print(error.errno, error.filename)
"""


def test_an_exported_program_that_the_disk_does_not_hold_names_its_file(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        place = disk.folder / "m" / "1"
        place.mkdir(parents=True)
        # In a process of its own: torch's own writer would end this one.
        ended = subprocess.run(
            [sys.executable, "-c", EXPORT, place / "fp32.pt2"], capture_output=True, text=True, check=False
        )
        assert (ended.returncode, ended.stdout.split()) == (0, [str(errno.ENOSPC), str(place / "fp32.pt2")])
        assert list(place.iterdir()) == []
