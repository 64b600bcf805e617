"""A disk failure costs what was to be stored, and never the serving: a full disk, a read-only one, one with bad blocks.

SD cards and flash fill up, and the kernel mounts a damaged file system read-only, while the models are in memory and
callers wait. `is_disk_failure` tells such an error from a mistake in the configuration (no such folder, no permission),
which is best reported at the start, by ending it.

What is lost while the disk takes nothing is said by the part that keeps it: the session's number and rollouts of a
device (`edge_agent/fleet/epoch.py`, `edge_agent/delivery`), what was measured
(`tidegate/workers/warming/measured_costs.py`), shared metrics (`tidegate/metrics/sharing.py`), stored requests
(`database.py`), and log lines (`tidegate/runtime/logs.py`).
"""

from __future__ import annotations

import errno
from typing import Final

_FAILURES: Final = frozenset(
    {
        errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS,
        # Bad blocks, a checksum that does not hold, structures that do not fit: ext4, XFS, btrfs and F2FS say so.
        errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO),
    }
)  # fmt: skip


def is_disk_failure(error: OSError) -> bool:
    """Whether the disk takes nothing now, through no mistake of the configuration's."""
    return error.errno in _FAILURES
