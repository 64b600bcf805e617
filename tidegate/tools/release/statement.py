"""The statement of a release says which files were made, by which builder, and out of which commit.

It is an in-toto statement with SLSA's predicate for builds. It holds no time and no number of a run, so the same
commit, built twice by the same builder, has the same statement. A statement is the builder's word: what makes it worth
something is its signature (`envelope.py`), and anybody's own build of the same commit.

Source: in-toto Attestation Framework, "Statement layer specification", version 1; SLSA 1.0, "Provenance".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, field

from tidegate.rollout.canonical import canonical
from tidegate.tools.release.checksums import MOST_FILES, STATEMENT, SUMS, Digests, ReleaseRefused

BUILD_TYPE: Final = "urn:tidegate:make-dist:1"
_STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
_PREDICATE_TYPE: Final = "https://slsa.dev/provenance/v1"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?\Z")
Hexadecimal = Annotated[str, Meta(pattern=r"^[0-9a-f]{40,64}\Z")]
Text = Annotated[str, Meta(max_length=500)]


class DigestedFile(msgspec.Struct, frozen=True):
    """A name with its digests by algorithm: `sha256` of a file, `gitCommit` of a commit."""

    name: Text
    digest: Annotated[dict[Text, Hexadecimal], Meta(min_length=1, max_length=4)]


class ReleaseParameters(msgspec.Struct, frozen=True):
    """What the builder chose."""

    version: Text


class BuildDefinition(msgspec.Struct, frozen=True, rename="camel"):
    """What was built, out of what."""

    build_type: Text
    external_parameters: ReleaseParameters
    resolved_dependencies: Annotated[tuple[DigestedFile, ...], Meta(max_length=MOST_FILES)]


class Builder(msgspec.Struct, frozen=True):
    id: Text


class RunDetails(msgspec.Struct, frozen=True):
    builder: Builder


class BuildPredicate(msgspec.Struct, frozen=True, rename="camel"):
    build_definition: BuildDefinition
    run_details: RunDetails


class ReleaseStatement(msgspec.Struct, frozen=True, rename="camel"):
    """The whole statement; its bytes are canonical JSON."""

    subject: Annotated[tuple[DigestedFile, ...], Meta(min_length=1, max_length=MOST_FILES + 1)]
    predicate: BuildPredicate
    type_: Literal["https://in-toto.io/Statement/v1"] = field(name="_type")
    predicate_type: Literal["https://slsa.dev/provenance/v1"]

    @property
    def version(self) -> str:
        return self.predicate.build_definition.external_parameters.version

    @property
    def builder(self) -> str:
        return self.predicate.run_details.builder.id

    @property
    def commit(self) -> str:
        """The commit that it names; "" where it names none."""
        materials = self.predicate.build_definition.resolved_dependencies
        return next((one.digest["gitCommit"] for one in materials if "gitCommit" in one.digest), "")

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of each subject, by name; "" where it has none."""
        return {one.name: one.digest.get("sha256", "") for one in self.subject}


_decoder: Final = msgspec.json.Decoder(ReleaseStatement)


def make_statement(version: str, builder: str, commit: str, materials: Digests, files: Digests) -> bytes:
    """The content of `provenance.json`.

    Args:
        builder: a URI that names the machine or service that builds, given by its operator.
        commit: 40 or 64 hexadecimal digits.
        materials: SHA-256 of each file that says what is built with, by its path in the checkout.
        files: SHA-256 of every file of the release, `SHA256SUMS` included.

    Raises:
        ValueError: the builder is no URI, or the commit is none.
    """
    check_builder(builder)
    if not _COMMIT.match(commit):
        raise ValueError(f"{commit!r} is no commit: 40 or 64 hexadecimal digits")
    sources = (DigestedFile("commit", {"gitCommit": commit}), *_digested(materials))
    definition = BuildDefinition(BUILD_TYPE, ReleaseParameters(version), sources)
    return canonical(
        ReleaseStatement(
            subject=_digested(files),
            predicate=BuildPredicate(definition, RunDetails(Builder(builder))),
            type_=_STATEMENT_TYPE,
            predicate_type=_PREDICATE_TYPE,
        )
    )


def check_builder(builder: str) -> None:
    """Raises ValueError: it is no URI, or holds credentials, which a statement would publish."""
    parts = urlsplit(builder)
    if not parts.scheme or not (parts.netloc or parts.path) or any(one.isspace() for one in builder):
        raise ValueError(f"the builder {builder!r} is no URI: give one such as https://HOST/OWNER/REPOSITORY/release")
    if parts.username is not None or parts.password is not None:
        raise ValueError("the builder's URI holds a user's name or a password, which the statement would publish")


def read_statement(raw: bytes) -> ReleaseStatement:
    """Raises ReleaseRefused: it is no statement of a release of ours, or lists a file twice, or not `SHA256SUMS`."""
    try:
        statement = _decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ReleaseRefused(f"{STATEMENT}: no statement of a release: {error}") from error
    if statement.predicate.build_definition.build_type != BUILD_TYPE:
        raise ReleaseRefused(f"{STATEMENT}: it speaks of another build than one by `make dist`")
    if len(statement.digests) != len(statement.subject):
        raise ReleaseRefused(f"{STATEMENT}: a file stands there twice")
    if not statement.digests.get(SUMS):
        raise ReleaseRefused(f"{STATEMENT}: it says nothing of {SUMS}")
    return statement


def _digested(files: Mapping[str, str]) -> tuple[DigestedFile, ...]:
    return tuple(DigestedFile(name, {"sha256": digest}) for name, digest in sorted(files.items()))
