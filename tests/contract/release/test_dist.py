"""`make dist`: two builds of a commit are the same bytes, and what is not a commit or not the version is no release.

Everything runs in a small checkout of its own, with the product and what it is built with, so that the real one may be
in any state. The parts that take minutes (compiled wheel, packages, images) are left to `make dist` itself.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.lint.tree import PRODUCT, listed
from tests.support.chart.rendering import CHECKS, ROOT
from tidegate.security.attestation.keys import line_of, make_key, read_allowed
from tidegate.tools.release.sealed_release import verify, verify_checksums

# Of the checkout, what a release without Python is made of; the wheel's parts come on top where one is built.
KEPT = ("deploy", ".gitignore", "pyproject.toml", "constraints.txt", "LICENSE", "README.md", "CHANGELOG.md")
PARTS = "python requirements chart"
BUILDER = "https://builder.example/tidegate"
QUIET = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
needs_hatchling = pytest.mark.skipif(
    not any(CHECKS.parents[1].glob("lib/python3*/site-packages/hatchling")),
    reason="`make checks` could not set up Hatchling here",
)


def git(folder: Path, *words: str) -> str:
    who = {f"GIT_{one}_{what}": "a@b.example" for one in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    dates = {f"GIT_{one}_DATE": "2026-01-02T03:04:05+01:00" for one in ("AUTHOR", "COMMITTER")}
    done = subprocess.run(
        ["git", *words], cwd=folder, env=os.environ | QUIET | who | dates, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def copied(into: Path, parts: tuple[str, ...]) -> Path:
    """A checkout with one commit of these files and folders as they are now."""
    for path in listed(ROOT):
        if path.partition("/")[0] in parts and (ROOT / path).is_file():
            (into / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, into / path, follow_symlinks=False)
    for words in (("init", "--quiet"), ("add", "--all"), ("commit", "--quiet", "--message", "A release")):
        git(into, *words)
    return into


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied(tmp_path_factory.mktemp("release") / "small", KEPT)


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    made = make_key(folder / "operator.key")
    (folder / "operator.pub").write_text(f"{line_of(made, 'operator')}\n")
    return folder / "operator.key"


@pytest.fixture
def checkout(committed: Path, tmp_path: Path) -> Path:
    """A clone for a test to spoil."""
    subprocess.run(["git", "clone", "--quiet", "--shared", committed, tmp_path / "mine"], check=True)
    return tmp_path / "mine"


def loaded(checkout: Path) -> ModuleType:
    """The builder as it is in that checkout."""
    spec = importlib.util.spec_from_file_location("dist_under_test", checkout / "deploy" / "release" / "dist.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # which its dataclass looks for
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def dist(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Runs the builder in this process; `among`: the parts that there are."""
    before = os.umask(0o022)

    def run(*words: str, among: tuple[str, ...] = ()) -> int:
        module = loaded(checkout)
        if among:
            monkeypatch.setattr(module, "PARTS", {name: module.PARTS[name] for name in among})
        monkeypatch.setattr(sys, "argv", ["dist.py", *words])
        code: int = module.main()
        return code

    yield run
    os.umask(before)
    sys.modules.pop("dist_under_test", None)


def build(checkout: Path, key: Path, umask: int, **environment: str) -> dict[str, bytes]:
    """A whole run of `make dist`, without make; the files by name."""
    words = ["--parts", PARTS, "--key", str(key), "--builder", BUILDER]
    subprocess.run(
        [sys.executable, checkout / "deploy" / "release" / "dist.py", *words],
        check=True, umask=umask, env=os.environ | QUIET | environment, cwd="/", timeout=300, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    (folder,) = (checkout / "dist").iterdir()
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@needs_hatchling
@pytest.mark.slow
def test_two_builds_of_one_commit_are_the_same_bytes(tmp_path: Path, key: Path) -> None:
    committed, checkout = copied(tmp_path / "first", (*KEPT, *PRODUCT)), tmp_path / "and then another"
    subprocess.run(["git", "clone", "--quiet", "--shared", committed, checkout], check=True)
    for folder in (committed, checkout):
        (folder / ".venv-checks").symlink_to(CHECKS.parents[1])
    for path in checkout.rglob("*.py"):
        os.utime(path, (1e9, 1e9))
        path.chmod(0o600)
    git(checkout, "config", "core.fileMode", "false")
    (checkout / "tidegate" / "secret.py").write_text("PASSWORD = 'x'\n")
    (checkout / ".git" / "info" / "exclude").write_text("secret.py\n")  # which no .gitignore tells Hatchling

    first = build(committed, key, 0o022, TZ="UTC", PYTHONHASHSEED="1")
    second = build(checkout, key, 0o077, TZ="Asia/Kathmandu", PYTHONHASHSEED="2", LC_ALL="C", SOURCE_DATE_EPOCH="9")

    assert sorted(first) == sorted(second)
    assert [name for name in first if first[name] != second[name]] == []
    version = loaded(committed).version_in(ROOT)
    wheel, source = f"tidegate-{version}-py3-none-any.whl", f"tidegate-{version}.tar.gz"
    assert {wheel, source, f"tidegate-chart-{version}.tgz", "SHA256SUMS", "provenance.json", "constraints.txt",
            "provenance.intoto.jsonl", "requirements-gateway.txt"} <= set(first)  # fmt: skip

    release = checkout / "dist" / version
    verified = verify(release, read_allowed(key.with_suffix(".pub")))
    assert verified.statement is not None
    assert verified.statement.commit == git(committed, "rev-parse", "HEAD")
    assert (verified.statement.version, verified.statement.builder) == (version, BUILDER)
    with zipfile.ZipFile(release / wheel) as archive:
        names = archive.namelist()
        assert {info.date_time for info in archive.infolist()} == {(2026, 1, 2, 2, 4, 4)}, "the commit's, in UTC"
    assert "tidegate/cli.py" in names and "tidegate/secret.py" not in names
    with tarfile.open(release / source) as tar:
        assert f"tidegate-{version}/tidegate/secret.py" not in tar.getnames()


@pytest.mark.slow
def test_the_chart_is_archived_as_helm_reads_it(dist: Callable[..., int], checkout: Path) -> None:
    assert dist("--parts", "chart") == 0

    (folder,) = (checkout / "dist").iterdir()
    with tarfile.open(next(folder.glob("tidegate-chart-*.tgz"))) as tar:
        entries = tar.getmembers()
        held = {one.name.removeprefix("tidegate/"): tar.extractfile(one).read() for one in entries}  # type: ignore[union-attr]
    chart = ROOT / "deploy" / "helm" / "tidegate"
    assert held == {str(path.relative_to(chart)): path.read_bytes() for path in chart.rglob("*") if path.is_file()}
    assert {(one.uid, one.gid, one.uname, one.gname, one.mode) for one in entries} == {(0, 0, "", "", 0o644)}
    assert verify_checksums(folder).files == 1


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--version", "9.9.9"), "pyproject.toml has version {version}, not 9.9.9: set `version` there"),
        (("--key", "KEY"), "KEY signs a statement of who built this: name it by a URI, BUILDER="),
        (("--builder", "me"), "the builder 'me' is no URI"),
        (("--key", "/nowhere/operator.key", "--builder", BUILDER), "cannot read the signing key"),
    ],
)
def test_what_speaks_against_a_release_is_said_before_anything_is_built(
    dist: Callable[..., int],
    checkout: Path,
    key: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    why: str,
) -> None:
    code = dist("--parts", "chart", *(str(key) if word == "KEY" else word for word in words))

    assert code == 1
    assert why.format(version=loaded(ROOT).version_in(ROOT)) in capsys.readouterr().err
    assert not (checkout / "dist").exists()


@pytest.mark.slow
def test_a_tree_with_changes_is_refused_until_told_and_never_signed(
    dist: Callable[..., int], checkout: Path, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "deploy" / "helm" / "tidegate" / "new.txt").write_text("new")
    (checkout / "deploy" / "helm" / "tidegate" / "values.yaml").unlink()

    assert dist("--parts", "chart") == 1
    assert "commit, or DIRTY=1" in capsys.readouterr().err
    assert dist("--parts", "chart", "--dirty", "--builder", BUILDER, "--key", str(key)) == 1
    assert "what is not committed is not signed" in capsys.readouterr().err
    assert dist("--parts", "chart", "--dirty", "--builder", BUILDER) == 1
    assert dist("--parts", "chart", "--dirty") == 0

    (folder,) = (checkout / "dist").iterdir()
    with tarfile.open(next(folder.glob("*.tgz"))) as tar:
        names = set(tar.getnames())
    assert "tidegate/new.txt" in names and "tidegate/values.yaml" not in names


@pytest.mark.slow
def test_a_chart_of_another_version_is_refused(
    dist: Callable[..., int], checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = checkout / "deploy" / "helm" / "tidegate" / "Chart.yaml"
    path.write_text(path.read_text().replace("appVersion:", "appVersion: 9.9.9 #"))
    git(checkout, "commit", "--quiet", "--all", "--message", "Forget one")

    assert dist("--parts", "chart") == 1
    assert "Chart.yaml does not fit pyproject.toml" in capsys.readouterr().err
    assert list((checkout / "dist").iterdir()) == [], "nothing half-made is left"


@pytest.mark.slow
def test_what_cannot_be_built_is_left_out_with_a_word_and_refused_if_it_was_asked_for(
    dist: Callable[..., int], checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dist("--parts", "chart docs") == 1
    assert "docs: needs the site's environment: `make docs`" in capsys.readouterr().err
    assert list((checkout / "dist").iterdir()) == []

    assert dist(among=("chart", "docs")) == 0

    assert "docs: LEFT OUT: needs the site's environment" in capsys.readouterr().out
    (folder,) = (checkout / "dist").iterdir()
    assert sorted(path.name.partition("-")[0] for path in folder.iterdir()) == ["SHA256SUMS", "tidegate"]


@pytest.mark.slow
def test_a_release_is_replaced_as_a_whole_and_a_signed_one_not_at_all(
    dist: Callable[..., int], checkout: Path, key: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dist("--parts", "chart requirements") == 0
    assert dist("--parts", "chart", "--builder", BUILDER, "--key", str(key)) == 0
    (folder,) = (checkout / "dist").iterdir()
    assert not (folder / "constraints.txt").exists(), "of the build before"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    capsys.readouterr()

    assert dist("--parts", "chart requirements") == 1

    assert "is signed, and no build brings a signature back: remove it first" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.slow
def test_a_killed_run_leaves_nothing_to_the_next_and_two_do_not_meet(
    dist: Callable[..., int], checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "dist" / ".making-left" / "new").mkdir(parents=True)
    other = os.open(checkout / "dist", os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert dist("--parts", "chart") == 1
        assert "another `make dist` is at work" in capsys.readouterr().err
        assert (checkout / "dist" / ".making-left").exists(), "it may be the other's"
    finally:
        os.close(other)

    assert dist("--parts", "chart") == 0

    (folder,) = (checkout / "dist").iterdir()
    assert verify_checksums(folder).files == 1
