"""A figure names the commit it was measured at, and git says whether the code that it measures has changed since.

`figures.toml` lists for each bench the paths that its figures depend on; the bench's own file or folder counts
without being listed. A path that begins with `!` is taken out again.

Nothing here fails where there is no git or no history (an export, a shallow clone): what cannot be known is None, and
the reader of a page is told no more than is known. Where history was rewritten and the commit is gone, the one that
brought the result stands for it: what changed after that makes the figure stale in any case.
"""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
CONFIG: Final = Path(__file__).parent / "figures.toml"
PRODUCT: Final = ("gateway", "edge_agent", "cloud_pool", "tidegate")
SHORT: Final = 7  # digits of a commit on a page


@cache
def config() -> Mapping[str, Any]:
    """`figures.toml`: paths by bench, and the figures whose history is kept."""
    return tomllib.loads(CONFIG.read_text(encoding="utf-8"))


def depends_on(bench: str) -> list[str]:
    """What the figures of a bench depend on, as git's pathspecs."""
    listed = config()["paths"].get(bench, [])
    own = [f"tests/bench/{bench}.py", f"tests/bench/{bench}"]
    return own + [f":(exclude){path[1:]}" if path.startswith("!") else path for path in listed]


def measured_at(bench: str, paths: Sequence[str] = ()) -> dict[str, Any]:
    """Where a measurement that begins now belongs: its commit, the day, and what of its code is not in the commit."""
    found = git("rev-parse", "HEAD")
    changed = git("status", "--porcelain", "--", *(paths or depends_on(bench))) or ""
    return {
        "commit": found and found.strip(),
        "date": datetime.now(UTC).date().isoformat(),
        "uncommitted": [line[3:] for line in changed.splitlines()],
    }


def stale_since(bench: str, measured: Mapping[str, Any], root: Path = ROOT) -> str | None:
    """The first commit that changed what the figures depend on; "" where none did, None where that is unknown."""
    commit = _in_history(bench, measured.get("commit"), root)
    if not commit:
        return None
    if measured.get("uncommitted"):
        return str(commit)[:SHORT]  # what was measured is in no commit
    paths = depends_on(bench)
    changed = git("diff", "--name-only", str(commit), "HEAD", "--", *paths, root=root)
    if not changed:
        return changed
    since = git("rev-list", "--reverse", f"{commit}..HEAD", "--", *paths, root=root)
    since = since or git("rev-parse", "HEAD", root=root)  # measured at a later commit than this checkout's
    return since.split()[0][:SHORT] if since else None


def _in_history(bench: str, commit: str | None, root: Path) -> str | None:
    """The commit that was measured; in its place, if history was rewritten since, the one that brought the result."""
    if not commit or git("cat-file", "-e", f"{commit}^{{commit}}", root=root) is not None:
        return commit
    if (git("rev-parse", "--is-shallow-repository", root=root) or "").strip() != "false":
        return None
    return (git("log", "-1", "--format=%H", "--", f"tests/bench/results/{bench}.json", root=root) or "").strip() or None


def git(*words: str, root: Path = ROOT) -> str | None:
    """What git prints; None where it is not there or refuses."""
    try:
        ended = subprocess.run(("git", *words), cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return ended.stdout if ended.returncode == 0 else None


def missing(paths: Sequence[str], root: Path = ROOT) -> list[str]:
    """Listed paths that are not in the checkout."""
    return [path for path in paths if not (root / path.removeprefix("!")).exists()]
