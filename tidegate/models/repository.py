"""The model repository: a folder per model and version, each with one manifest that is either right or refused by name.

    ROOT/NAME/VERSION/model.yaml      what the version takes, gives and costs (`manifest.py`)
    ROOT/NAME/VERSION/ARTEFACT        one file per variant; a gateway's repository may lack them
    ROOT/NAME/VERSION/tokenizer.json  if the model takes text

Reading is strict. An unknown key is most often a misspelt one whose default then silently applies, so it is
an error, as is a second key of the same name, a value of the wrong type, and all that `validate.py` finds. Each error
names the file, the key and the value. A folder whose name starts with a dot is no model: builds and copies in progress
live in those and are renamed when they are complete, so a version that can be seen is whole.

A manifest may come from anywhere: its text is bounded in size and depth, and has no aliases, a dozen lines of which can
stand for billions of values.

A version whose manifest is damaged need not take its model with it: who serves models has it passed over where another
version of the model can be read, and says so (`pass_over`, `damaged`). A model that has no other is refused.

Digests are checked by `verify` and not on each read: a gateway has no artefacts to check.
The folders are read once, on first use; a new repository object reads them again.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Collection, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from tidegate.models.digest import sha256_of
from tidegate.models.fallback_model import fallback_problems
from tidegate.models.manifest import Manifest, Text, Variant
from tidegate.models.split_halves import halves_problems
from tidegate.models.validate import name_problem, problems
from tidegate.outcome import ModelNotFound
from tidegate.storage.atomic_file import write_atomically

MANIFEST_FILE = "model.yaml"
MAX_MANIFEST_BYTES = 1024 * 1024
MAX_TOKENIZER_BYTES = 128 * 1024 * 1024  # the largest in use, of multilingual models, have under 40 MB
_MAX_DEPTH = 32
# Of an integer: what a float holds. Python spells none of more than 4300 digits, not in an error either.
_MOST_BITS = 1024
_MAX_SHOWN = 200  # characters of a value in an error
_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>.*)`")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")


Damaged = Mapping[tuple[str, str], str]  # by name and version: why it cannot be read


class RepositoryError(Exception):
    """A repository, a manifest or an artefact that cannot be used; the message names file, key and value."""


class Repository:
    """The models under `root`. Reads the disk on first use and blocks while it does.

    Args:
        only: the names of the models that are read; None: all.
        pass_over: whether a version that cannot be read is passed over where its model has another one.

    Attributes:
        damaged: by name and version, why each that was passed over cannot be read. It is known once manifests are read.
    """

    def __init__(self, root: Path, *, only: Collection[str] | None = None, pass_over: bool = False) -> None:
        self.root = root
        self.damaged: Damaged = {}
        self._only = only
        self._pass_over = pass_over
        self._manifests: tuple[Manifest, ...] | None = None

    def manifests(self) -> tuple[Manifest, ...]:
        """Every model version, by name and then from the lowest version to the highest. Raises RepositoryError."""
        if self._manifests is None:
            read = ReadManifests(self.root, only=self._only)
            found, _ = read.look()
            missed = {of: why for of, why in read.damaged.items() if not (self._pass_over and of[0] in found)}
            wrong = list(missed.values())
            manifests = tuple(one for _, versions in sorted(found.items()) for one in versions)
            if not wrong:
                problems = (*fallback_problems(manifests), *halves_problems(manifests))
                wrong = [f"{self.root}: {problem}" for problem in problems]
            if wrong:
                raise RepositoryError("\n".join(wrong))
            self._manifests, self.damaged = manifests, read.damaged
        return self._manifests

    def manifest(self, name: str, version: str = "") -> Manifest:
        """One version, or the highest when `version` is empty. Raises ModelNotFound, RepositoryError."""
        found = [one for one in self.manifests() if one.name == name and version in ("", one.version)]
        if not found and (name, version) in self.damaged:
            raise RepositoryError(self.damaged[name, version])
        if not found:
            raise ModelNotFound(self._not_found(name, version))
        return found[-1]

    def folder(self, manifest: Manifest) -> Path:
        return self.root / manifest.name / manifest.version

    def artefact(self, manifest: Manifest, variant: Variant) -> Path:
        """Where the variant's artefact belongs, whether or not it is there."""
        return self.folder(manifest) / variant.artefact

    def tokenizer(self, manifest: Manifest) -> Path | None:
        """Where the model's tokenizer belongs; None for a model that takes no text."""
        return None if manifest.text is None else self.folder(manifest) / manifest.text.tokenizer

    def verify(self, manifest: Manifest, variant: Variant) -> None:
        """Raise RepositoryError unless the artefact, the files beside it and those of the pipeline's steps are there
        with the manifest's sizes and digests. Reads all of them."""
        verify_artefact(self.artefact(manifest, variant), variant)
        for one in variant.files:
            _verify_file(self.folder(manifest) / one.name, variant.name, one.size_bytes, one.sha256)
        for one in manifest.step_files:
            _verify_file(self.folder(manifest) / one.name, variant.name, one.size_bytes, one.sha256, what="pipeline of")

    def verify_tokenizer(self, manifest: Manifest) -> None:
        """Raise RepositoryError unless a model that takes text has what reads it, with the digests of the manifest."""
        folder, generative = self.folder(manifest), manifest.generative
        if manifest.text is not None:
            verify_tokenizer(folder / manifest.text.tokenizer, manifest.text)
        if generative is not None:
            read_text_file(folder / generative.tokenizer, "the tokenizer", generative.tokenizer_sha256)
            if generative.chat_template is not None:
                read_text_file(folder / generative.chat_template, "the template", generative.chat_template_sha256)

    def _not_found(self, name: str, version: str) -> str:
        versions = [one.version for one in self.manifests() if one.name == name]
        if versions:
            return f"model {name!r} has no version {version!r} (versions: {', '.join(versions)})"
        names = sorted({one.name for one in self.manifests()})
        return f"there is no model {name!r} (models: {', '.join(names) or 'none'})"

    def __repr__(self) -> str:
        read = "unread" if self._manifests is None else f"{len(self._manifests)} versions"
        return f"<Repository {self.root} {read}>"


class ReadManifests:
    """The manifests of a repository that is looked at again and again: only those that have changed are read.

    Parsing takes some 10 ms each, which the process would be busy with at every look.

    Args:
        only: the names of the models that are looked at; None: all.

    Attributes:
        damaged: by name and version, as of the last look, why each cannot be read; "" where a whole model cannot be.
    """

    def __init__(self, root: Path, *, only: Collection[str] | None = None) -> None:
        self.damaged: Damaged = {}
        self._root = root
        self._only = only
        self._read: dict[Path, tuple[tuple[int, int, int], Manifest | str]] = {}  # by folder: what its file looked like

    def look(self) -> tuple[dict[str, tuple[Manifest, ...]], dict[str, str]]:
        """The versions of each model that can be read, lowest first; and by model why another one of it cannot be.

        One bad folder hides no other model, as it would while everything is served that there is. Blocks. Raises
        RepositoryError where the root itself cannot be read.
        """
        found: dict[str, list[Manifest]] = {}
        damaged: dict[tuple[str, str], str] = {}
        folders = list[Path]()
        for entry in _model_folders(self._root):
            if self._only is not None and entry.name not in self._only:
                continue
            try:
                folders += _version_folders(entry)
            except RepositoryError as error:
                damaged[entry.name, ""] = str(error)
        self._read = {folder: self._read_again(folder) for folder in folders}
        for folder, (_, manifest) in self._read.items():
            if isinstance(manifest, str):
                damaged[folder.parent.name, folder.name] = manifest
            else:
                found.setdefault(folder.parent.name, []).append(manifest)
        self.damaged = damaged
        ordered = {name: tuple(sorted(ones, key=lambda one: version_key(one.version))) for name, ones in found.items()}
        return ordered, {name: why for (name, _), why in damaged.items()}

    def _read_again(self, folder: Path) -> tuple[tuple[int, int, int], Manifest | str]:
        try:
            about = (folder / MANIFEST_FILE).stat()
            looks = about.st_size, about.st_mtime_ns, about.st_ino
        except OSError:
            looks = -1, 0, 0
        known = self._read.get(folder)
        if known is not None and known[0] == looks and looks[0] >= 0:
            return known
        try:
            return looks, load_manifest(folder)
        except RepositoryError as error:
            return looks, str(error)

    def __repr__(self) -> str:
        return f"<ReadManifests of {self._root}, {len(self._read)} versions>"


def load_manifest(folder: Path) -> Manifest:
    """The manifest of one version's folder. Raises RepositoryError."""
    path = folder / MANIFEST_FILE
    manifest = parse_manifest(_read(path), path)
    for key, wanted, got in (("name", folder.parent.name, manifest.name), ("version", folder.name, manifest.version)):
        if wanted != got:
            raise RepositoryError(f"{path}: {key}: {got!r} does not match the folder's {wanted!r}")
    return manifest


def parse_manifest(text: str, source: Path) -> Manifest:
    """The manifest that `text` spells; `source` is for the errors. Raises RepositoryError."""
    if len(text) > MAX_MANIFEST_BYTES:
        raise RepositoryError(f"{source}: has more than {MAX_MANIFEST_BYTES} characters")
    try:
        raw = yaml.load(text, Loader=_StrictLoader)  # a SafeLoader that also refuses a key given twice
    except yaml.YAMLError as error:
        raise RepositoryError(f"{source}: is not valid YAML: {error}") from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        # What PyYAML lets out where a value is not what its tag or its looks promise: `2024-13-99`, `0x_`, `!!bool x`.
        raise RepositoryError(f"{source}: is not valid YAML: a value that cannot be read: {_short(error)}") from error
    if not isinstance(raw, dict):
        raise RepositoryError(f"{source}: must be a mapping of keys, not {type(raw).__name__}")
    manifest = _convert(raw, source)
    if found := problems(manifest):
        raise RepositoryError("\n".join(f"{source}: {problem}" for problem in found))
    return manifest


def manifest_text(manifest: Manifest) -> str:
    """The manifest as YAML; equal manifests give equal texts, with the keys in the order of their declaration."""
    # Through the types once, so that a bound given as 0 in code is spelled 0.0, as it reads back.
    canonical = msgspec.convert(msgspec.to_builtins(manifest), Manifest)
    values = {"schema": manifest.schema, **msgspec.to_builtins(canonical)}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)


def save_manifest(folder: Path, manifest: Manifest) -> Path:
    """Write the manifest into its version's folder, all or nothing. Raises RepositoryError when it is not valid."""
    path = folder / MANIFEST_FILE
    if found := problems(manifest):
        raise RepositoryError("\n".join(f"{path}: {problem}" for problem in found))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, manifest_text(manifest).encode())
    return path


def verify_artefact(path: Path, variant: Variant) -> None:
    """Raise RepositoryError unless `path` has the size and the digest that `variant` names."""
    _verify_file(path, variant.name, variant.size_bytes, variant.sha256)


def _verify_file(path: Path, variant: str, size_bytes: int, sha256: str, *, what: str = "artefact of") -> None:
    try:
        found_bytes = path.stat().st_size
        # The size first: it costs nothing and finds every cut-off copy.
        if found_bytes != size_bytes:
            raise RepositoryError(f"{path}: has {found_bytes} bytes, but variant {variant!r} names {size_bytes}")
        digest = sha256_of(path)
    except OSError as error:
        raise RepositoryError(f"{path}: the {what} variant {variant!r}: {error.strerror}") from error
    if digest != sha256:
        raise RepositoryError(f"{path}: has sha256 {digest}, but variant {variant!r} names {sha256}")


def verify_tokenizer(path: Path, text: Text) -> None:
    """Raise RepositoryError unless `path` is there and has the digest that `text` names, if it names one."""
    read_tokenizer(path, text)


def read_tokenizer(path: Path, text: Text) -> bytes:
    """The tokenizer's bytes, as `read_text_file` reads them. Raises RepositoryError."""
    return read_text_file(path, "the tokenizer", text.sha256)


def read_text_file(path: Path, what: str, sha256: str | None) -> bytes:
    """A tokenizer's or a template's bytes, read once, so that what was checked is what is used.

    Args:
        what: names it in errors.
        sha256: None: any will do.

    Raises:
        RepositoryError: it is not there, is too large, or has another digest.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TOKENIZER_BYTES + 1)
    except OSError as error:
        raise RepositoryError(f"{path}: {what}: {error.strerror}") from error
    if len(content) > MAX_TOKENIZER_BYTES:
        raise RepositoryError(f"{path}: {what} has more than {MAX_TOKENIZER_BYTES} bytes")
    digest = hashlib.sha256(content).hexdigest()
    if sha256 is not None and digest != sha256:
        raise RepositoryError(f"{path}: has sha256 {digest}, but the manifest names {sha256} for {what}")
    return content


def version_key(version: str) -> tuple[tuple[int, int, str], ...]:
    """Orders versions as people do: 2 before 10, 1.2 before 1.10, numbers before words."""
    parts = (part for part in re.split(r"(\d+)|[._-]", version) if part)
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)


def _model_folders(root: Path) -> list[Path]:
    """Raises RepositoryError where the root cannot be read."""
    try:
        return sorted(root.iterdir())
    except OSError as error:
        raise RepositoryError(
            f"{error.filename}: cannot read the model repository: {error.strerror}; "
            "`tidegate model build all --repository DIR` makes one with the demo models"
        ) from error


def _version_folders(entry: Path) -> list[Path]:
    """Those of one entry of the root, none of one that is no model. Raises RepositoryError where it cannot be read."""
    is_name = name_problem(entry.name) is None
    try:
        if not _is_visible_folder(entry):
            return []
        versions = [version for version in sorted(entry.iterdir()) if _is_visible_folder(version)]
        # The root of a mounted volume has `lost+found`. Of a model under a wrong name its author hears all the same.
        return versions if is_name else [version for version in versions if (version / MANIFEST_FILE).exists()]
    except OSError as error:
        if not is_name:
            return []
        raise RepositoryError(f"{error.filename}: cannot read the model's folder: {error.strerror}") from error


def _is_visible_folder(entry: Path) -> bool:
    return entry.is_dir() and not entry.name.startswith(".")


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise RepositoryError(f"{path}: cannot read the manifest: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RepositoryError(f"{path}: is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _convert(raw: dict[Any, Any], source: Path) -> Manifest:
    try:
        return msgspec.convert(raw, Manifest)
    except msgspec.ValidationError as error:
        raise RepositoryError(f"{source}: {_explain(raw, error)}") from error


def _explain(raw: dict[Any, Any], error: msgspec.ValidationError) -> str:
    """msgspec reports what was expected and where; this adds the value, and the key that was probably meant."""
    match = _AT.match(str(error))
    assert match is not None  # the pattern matches any text
    what, steps = match["what"], _STEP.findall(match["path"] or "")
    if "[...]" in (match["path"] or ""):
        return _explain_entry(raw, match["path"], error)
    value = _at(raw, [int(index) if index else name for name, index in steps])
    key = (match["path"] or "").removeprefix(".")
    if unknown := _UNKNOWN.fullmatch(what):
        return _explain_unknown(key, unknown["field"], value)
    return f"{key or 'the manifest'}: {what}" + (f", namely {_short(repr(value))}" if key else "")


def _explain_entry(raw: dict[Any, Any], path: str, error: msgspec.ValidationError) -> str:
    """A mapping with names of the author's own (`axes`, `priority_queue_policy`): msgspec leaves them out of its path.

    The entry that is wrong is the one that is refused in the same words when the mapping has no other.
    """
    where = path.partition("[...]")[0]
    steps = [int(index) if index else name for name, index in _STEP.findall(where)]
    entries: dict[Any, Any] = _at(raw, steps)
    name = next(name for name, value in entries.items() if _refusal(_with(raw, steps, {name: value})) == str(error))
    what = str(error).rpartition(" - at `")[0]
    return f"{where.removeprefix('.')}.{_short(name)}: {what}, namely {_short(repr(entries[name]))}"


def _at(raw: Any, steps: list[Any]) -> Any:
    for step in steps:
        raw = raw[step]
    return raw


def _with(raw: Any, steps: list[Any], value: Any) -> Any:
    """`raw` with `value` at the end of the steps, in the same order; shares what is not on the way."""
    if not steps:
        return value
    changed = raw.copy()
    changed[steps[0]] = _with(raw[steps[0]], steps[1:], value)
    return changed


def _refusal(raw: Any) -> str:
    try:
        msgspec.convert(raw, Manifest)
    except msgspec.ValidationError as error:
        return str(error)
    return ""


def _explain_unknown(key: str, field: str, holder: Any) -> str:
    known = _known_fields(holder)
    near = difflib.get_close_matches(field, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    value = holder.get(field) if isinstance(holder, dict) else None
    return f"unknown key {_short(f'{key}.{field}'.lstrip('.'))!r} = {_short(repr(value))}{hint}"


def _short(words: object) -> str:
    text = str(words)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"


def _known_fields(holder: Any) -> list[str]:
    """Every key of any part of a manifest; near enough for a hint, and it cannot go stale."""
    known: dict[str, None] = {}
    pending: list[Any] = [msgspec.inspect.type_info(Manifest)]
    while pending:
        kind = pending.pop()
        if isinstance(kind, msgspec.inspect.StructType):
            known.update((field.encode_name, None) for field in kind.fields)
            pending.extend(field.type for field in kind.fields)
        pending.extend(getattr(kind, "types", ()))
        pending.extend(part for part in (getattr(kind, "item_type", None), getattr(kind, "value_type", None)) if part)
    return [name for name in known if not (isinstance(holder, dict) and name in holder)]


def _quick_loader() -> Any:
    """PyYAML's safe loader with libyaml's parser, where it has that: ten times faster, and composed in Python still.

    A pool reads a manifest beside its calls, which wait for the interpreter meanwhile.
    """
    if not yaml.__with_libyaml__:
        return yaml.SafeLoader
    from yaml._yaml import CParser  # there with libyaml only

    class Loader(
        yaml.composer.Composer, CParser, yaml.constructor.SafeConstructor, yaml.resolver.Resolver
    ):  # the composer first: the parser has one of its own, which could not be bounded
        def __init__(self, stream: str) -> None:
            CParser.__init__(self, stream)
            for part in (yaml.composer.Composer, yaml.constructor.SafeConstructor, yaml.resolver.Resolver):
                part.__init__(self)

    return Loader


if TYPE_CHECKING:
    _QuickLoader = yaml.SafeLoader
else:
    _QuickLoader = _quick_loader()


class _StrictLoader(_QuickLoader):
    """YAML lets a key appear twice and keeps the last; in a manifest that is a mistake."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        wrong = "aliases are not allowed" if self.check_event(yaml.AliasEvent) else ""
        if wrong or self._depth >= _MAX_DEPTH:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, wrong or "nested too deeply", mark)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        if isinstance(value, str) and any("\ud800" <= one <= "\udfff" for one in value):
            # Written as an escape; it could be put into no message and no file.
            raise yaml.constructor.ConstructorError(None, None, "a text that is no Unicode", node.start_mark)
        return value

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value: int = super().construct_yaml_int(node)
        if value.bit_length() > _MOST_BITS:
            raise yaml.constructor.ConstructorError(
                None, None, f"an integer of {value.bit_length()} bits", node.start_mark
            )
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is there twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.construct_yaml_int)
