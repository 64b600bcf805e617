"""Which of the system's errors are the disk's, and which are a mistake that ends a start."""

from __future__ import annotations

import errno

import pytest

from tidegate.storage.disk_failure import is_disk_failure


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EROFS", "EIO", "EFBIG", "EBADMSG", "EUCLEAN"])
def test_a_full_a_read_only_and_a_damaged_disk_are_failures_of_the_disk(code: str) -> None:
    assert is_disk_failure(OSError(getattr(errno, code), "no"))


@pytest.mark.parametrize("code", ["ENOENT", "EACCES", "EPERM", "ENOTDIR", "ENAMETOOLONG"])
def test_a_wrong_path_and_missing_rights_are_mistakes(code: str) -> None:
    assert not is_disk_failure(OSError(getattr(errno, code), "no"))
