"""Builds a release into dist/VERSION by one command, out of what is committed and nothing else.

    make dist                                           every part that can be built here
    make dist VERSION=0.2.0 PARTS="python chart"        some of them, which then have to succeed
    make dist KEY=operator.key BUILDER=https://HOST/ME  with a statement of its making, signed

The commit is cloned into a folder of its own first, so that no ignored file, no file mode and no half-written file of
the checkout gets into a release. All that is built takes its time from the commit (SOURCE_DATE_EPOCH). The folder is
made beside its place and moved there as a whole: dist/VERSION is complete, or it is what it was before.

Parts of the same commit that are the same bytes wherever they are built: `python`, `requirements`, `chart`, and with
them `SHA256SUMS` and the statement. docs/releasing.md says which others are not, and why.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gzip
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from tidegate.config import ConfigError
from tidegate.security.attestation.keys import read_key
from tidegate.tools.release.checksums import ENVELOPE, ReleaseRefused, digest_of_file
from tidegate.tools.release.sealed_release import ReleaseOrigin, seal, sign
from tidegate.tools.release.statement import check_builder

ROOT: Final = Path(__file__).resolve().parents[2]
CHART: Final = "deploy/helm/tidegate"
IMAGES: Final = ("gateway", "edge", "pool-cpu")  # pool-cuda has to be named: 6 GB
_MAKING: Final = ".making-"
_LINES_OF_A_LOG: Final = 15


class NotBuilt(Exception):
    """There is no release; the text says why, and the way out."""


class LeftOut(Exception):
    """A part cannot be built on this machine; the text says what it needs."""


@dataclass(frozen=True)
class Build:
    """What every part is told."""

    source: Path  # a clone of the commit
    into: Path
    version: str
    environment: Mapping[str, str]
    images: Sequence[str]

    @property
    def epoch(self) -> int:
        return int(self.environment["SOURCE_DATE_EPOCH"])

    def run(self, *command: str | Path, **more: str) -> None:
        """A command in the clone. Raises NotBuilt: it failed; with the end of what it wrote."""
        words = [str(word) for word in command]
        try:
            done = subprocess.run(
                words,
                cwd=self.source, env={**self.environment, **more}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, errors="replace", check=False,
            )  # fmt: skip
        except OSError as error:
            raise NotBuilt(f"{words[0]}: {error.strerror}; `make dist` sets up what it needs") from error
        if done.returncode:
            tail = "\n".join(done.stdout.splitlines()[-_LINES_OF_A_LOG:])
            raise NotBuilt(f"{shlex.join(words)} ended with {done.returncode}:\n{tail}")


def python(build: Build) -> None:
    """The source distribution, and the pure wheel out of it."""
    build.run(ROOT / ".venv-checks/bin/python", "-m", "build", "--no-isolation", "--outdir", build.into, build.source)


def compiled(build: Build) -> None:
    """The wheel with the gateway's decisions compiled, for this machine."""
    if shutil.which(os.environ.get("CC", "cc")) is None:
        raise LeftOut("needs a C compiler (Debian: apt install gcc libc6-dev python3-dev)")
    ready = ROOT / ".venv-compiled" / ".set-up"
    build.run("make", "-C", ROOT, ready.relative_to(ROOT))
    told = (f"COMPILED={ready.parent}", f"WHEELS={build.into}")
    build.run("make", f"--assume-old={ready}", *told, "wheel-compiled")


def chart(build: Build) -> None:
    """The Helm chart as `helm install` takes it."""
    told = yaml.safe_load((build.source / CHART / "Chart.yaml").read_text(encoding="utf-8"))
    if {str(told["version"]), str(told["appVersion"])} != {build.version}:
        words = f"it has version {told['version']} and appVersion {told['appVersion']}"
        raise NotBuilt(f"{CHART}/Chart.yaml does not fit pyproject.toml, which has {build.version}: {words}")
    archive(build.source / CHART, build.into / f"tidegate-chart-{build.version}.tgz", "tidegate", build.epoch)


def requirements(build: Build) -> None:
    """What each process needs, with the digests of its files."""
    shutil.copyfile(build.source / "constraints.txt", build.into / "constraints.txt")
    for path in (build.source / "deploy" / "requirements").glob("*.txt"):
        shutil.copyfile(path, build.into / f"requirements-{path.name}")


def sbom(build: Build) -> None:
    """The bill of what the tests ran with."""
    build.run("make", "-C", ROOT, "sbom", f"SBOM={build.into / f'tidegate-{build.version}.sbom.cdx.json'}")


def docs(build: Build) -> None:
    """The documentation's site."""
    environment = ROOT / ".venv-docs"
    if not (environment / ".set-up").exists():
        raise LeftOut("needs the site's environment: `make docs` sets it up")
    (build.source / ".venv-docs").symlink_to(environment)
    build.run(environment / "bin" / "mkdocs", "build", "--strict", "--quiet", NO_MKDOCS_2_WARNING="1")
    name = f"tidegate-docs-{build.version}"
    archive(build.source / "dist" / "docs", build.into / f"{name}.tar.gz", name, build.epoch)


def debian(build: Build) -> None:
    """A Debian package of each process."""
    if shutil.which("dpkg-deb") is None:
        raise LeftOut("needs dpkg-deb")
    for image in collected(build, [one for one in build.images if one != "pool-cuda"]):
        build.run("deploy/debian/build.sh", image, build.into)


def images(build: Build) -> None:
    """Each image as an archive.

    `gunzip -c FILE | podman load` takes it; podman 4.3 itself reads no compressed one.
    """
    engine = shlex.split(os.environ.get("ENGINE", "podman"))
    needed = [engine[0]] if os.environ.get("BASE") else [engine[0], "mmdebstrap"]
    if absent := [one for one in needed if shutil.which(one) is None]:
        raise LeftOut(f"needs {' and '.join(absent)}")
    if os.geteuid() != 0:
        raise LeftOut("needs root")
    for image in collected(build, build.images):
        tag = f"localhost/tidegate-{image}:{build.version}"
        build.run("deploy/containers/build.sh", image, tag)
        into = build.into / f"tidegate-image-{image}-{build.version}-{platform.machine()}.tar"
        build.run(*engine, "save", "--output", into, tag)
        build.run("gzip", "--no-name", into)


def collected(build: Build, images: Sequence[str]) -> Iterator[str]:
    """Each image once its wheels are there. Raises LeftOut: behind the last one, where some cannot be collected."""
    failures = []
    for image in images:
        if not (build.source / "dist" / "wheels" / image).exists():
            try:
                build.run("deploy/containers/wheels.sh", image)
            except NotBuilt as error:
                shutil.rmtree(build.source / "dist" / "wheels" / image, ignore_errors=True)
                failures.append(f"the wheels of {image} cannot be collected here: {error}")
                continue
        yield image
    if failures:
        raise LeftOut("\n".join(failures))


PARTS: Final[dict[str, Callable[[Build], None]]] = {
    "python": python, "compiled": compiled, "requirements": requirements, "chart": chart, "sbom": sbom, "docs": docs,
    "debian": debian, "images": images,
}  # fmt: skip


def main() -> int:
    given = arguments()
    try:
        release = dist(given)
    except (NotBuilt, ReleaseRefused, ConfigError) as error:
        print(f"no release: {error}", file=sys.stderr)
        return 1
    held_to = f"--key {given.key.with_suffix('.pub')}" if given.key else "--checksums-only"
    print(f"{release} is made; tidegate release verify {release} {held_to}")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", help="the version that you mean; refused where pyproject.toml has another")
    parser.add_argument("--parts", help=f"by blanks, of {' '.join(PARTS)}; default: all that can be built here")
    parser.add_argument("--images", default=" ".join(IMAGES), help="of which images and packages are made")
    parser.add_argument("--builder", help="URI that names this builder: a statement of the making is written")
    parser.add_argument("--key", type=Path, help="key that signs the statement (tidegate keys signing create)")
    parser.add_argument("--dirty", action="store_true", help="build what is not committed, too; never signed")
    given = parser.parse_args()
    if unknown := sorted(set((given.parts or "").split()) - set(PARTS)):
        parser.error(f"no part is called {', '.join(unknown)}: {', '.join(PARTS)}")
    return given


def dist(given: argparse.Namespace) -> Path:
    """Build; the folder. Raises NotBuilt, and what seal and sign raise."""
    os.umask(0o022)  # modes are part of an archive
    version, commit, dirty = pinned_down(given)
    key = read_key(given.key, "signing key", "tidegate keys signing create") if given.key else None
    final = ROOT / "dist" / version
    if (final / ENVELOPE).exists():
        raise NotBuilt(f"{final} is signed, and no build brings a signature back: remove it first, or build elsewhere")
    final.parent.mkdir(exist_ok=True)
    with alone(final.parent), tempfile.TemporaryDirectory(prefix=_MAKING, dir=final.parent) as scratch:
        source, into = Path(scratch, "tidegate"), Path(scratch, "new")
        clone(source, commit, with_changes=dirty)
        into.mkdir()
        build = Build(source, into, version, environment(commit), given.images.split())
        make_parts(build, given.parts)
        origin = ReleaseOrigin(version, given.builder, commit, materials(source)) if given.builder else None
        seal(into, origin)
        if key is not None:
            print(f"signed by the key {sign(into, key)}")
        if final.exists():
            final.rename(Path(scratch, "old"))
        into.rename(final)
    for path in sorted(final.iterdir()):
        print(f"  {path.stat().st_size:>12,} {path.name}")
    return final.relative_to(ROOT)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder, and remove what runs that were killed have left. Raises NotBuilt: another run holds it."""
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NotBuilt(f"another `make dist` is at work in {folder}: wait until it has ended") from None
        for left in folder.glob(f"{_MAKING}*"):
            shutil.rmtree(left)
        yield
    finally:
        os.close(held)


def pinned_down(given: argparse.Namespace) -> tuple[str, str, bool]:
    """Version, commit, and whether there are changes, once nothing speaks against a release. Raises NotBuilt."""
    commit = git("rev-parse", "HEAD")
    changed = git("status", "--porcelain").splitlines()
    version = version_in(ROOT) if given.dirty else version_of(commit)
    if given.version not in (None, version):
        raise NotBuilt(
            f"pyproject.toml has version {version}, not {given.version}: set `version` there, and `version` and "
            f"`appVersion` in {CHART}/Chart.yaml, and commit; or leave VERSION out, for {version}"
        )
    if changed and not given.dirty:
        shown = "\n".join(changed[:10] + ["…"] * (len(changed) > 10))
        raise NotBuilt(f"the checkout has changes, so no commit is what would be built; commit, or DIRTY=1:\n{shown}")
    if given.key and changed:
        raise NotBuilt("what is not committed is not signed, for the statement would name a commit that it is not")
    if given.key and not given.builder:
        raise NotBuilt("KEY signs a statement of who built this: name it by a URI, BUILDER=https://HOST/ME")
    if given.builder and changed:
        raise NotBuilt("a statement would name a commit that this is not: commit, or leave BUILDER out")
    if given.builder:
        try:
            check_builder(given.builder)
        except ValueError as error:
            raise NotBuilt(str(error)) from error
    return version, commit, bool(changed)


def version_of(commit: str) -> str:
    return _version(git("show", f"{commit}:pyproject.toml"))


def version_in(folder: Path) -> str:
    return _version((folder / "pyproject.toml").read_text(encoding="utf-8"))


def _version(project: str) -> str:
    found: dict[str, Any] = tomllib.loads(project)
    version = str(found["project"]["version"])
    if not re.fullmatch(r"[0-9][A-Za-z0-9.+]*", version):  # it becomes a folder's name
        raise NotBuilt(f"pyproject.toml has the version {version!r}, which is none")
    return version


def clone(source: Path, commit: str, *, with_changes: bool) -> None:
    """The commit in a folder of its own, with git's own modes; with changes also what is not committed or ignored."""
    git("clone", "--quiet", "--shared", "--no-checkout", "--", str(ROOT), str(source))
    git("-c", "core.autocrlf=false", "-c", "advice.detachedHead=false", "checkout", "--quiet", commit, where=source)
    if with_changes:
        there = set(filter(None, git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")))
        for gone in (path for path in there if not (ROOT / path).exists()):
            (source / gone).unlink(missing_ok=True)
        for path in (path for path in there if (ROOT / path).is_file()):
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            (source / path).unlink(missing_ok=True)  # which may be a link, to be written over and not through
            shutil.copy(ROOT / path, source / path, follow_symlinks=False)


def make_parts(build: Build, wanted: str | None) -> None:
    """Each part in turn. Raises NotBuilt: one failed, or was asked for and cannot be built here."""
    for name in wanted.split() if wanted else PARTS:
        print(f"{name}: {str(PARTS[name].__doc__).partition('.')[0].lower()}", flush=True)
        try:
            PARTS[name](build)
        except LeftOut as error:
            if wanted:
                raise NotBuilt(f"{name}: {error}") from error
            print(f"{name}: LEFT OUT: {error}", flush=True)
    if f"## {build.version} (unreleased)" in (build.source / "CHANGELOG.md").read_text(encoding="utf-8"):
        print(f"CHANGELOG.md still calls {build.version} unreleased")


def environment(commit: str) -> dict[str, str]:
    """Nothing of the machine that would show in files."""
    own = {"SOURCE_DATE_EPOCH": git("show", "--no-patch", "--format=%ct", commit), "TZ": "UTC", "LC_ALL": "C.UTF-8"}
    left = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return {**left, **own, "PYTHONHASHSEED": "0"}


def materials(source: Path) -> dict[str, str]:
    """SHA-256 of what says what is built with, and installed beside it."""
    paths = [source / "pyproject.toml", source / "constraints.txt", *(source / "deploy" / "requirements").glob("*.txt")]
    return {str(path.relative_to(source)): digest_of_file(path) for path in paths}


def archive(folder: Path, into: Path, top: str, epoch: int) -> None:
    """The files of a folder below `top` in a tar archive that says nothing of when, where and by whom it was made.

    A link becomes the file that it leads to, as Helm packs it: what it leads to is not in the archive.
    """
    with (
        into.open("wb") as file,
        gzip.GzipFile("", "wb", 9, file, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar,
    ):
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = tarfile.TarInfo(f"{top}/{path.relative_to(folder).as_posix()}")
            entry.size, entry.mtime = path.stat().st_size, epoch
            entry.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            with path.open("rb") as content:
                tar.addfile(entry, content)


def git(*words: str, where: Path = ROOT) -> str:
    done = subprocess.run(["git", *words], cwd=where, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotBuilt(f"git {words[0]}: {done.stderr.strip()}; a release is made from a git checkout")
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
