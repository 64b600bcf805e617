"""A demo model is kept when it is there and whole, and built anew otherwise.

"Whole" means that the manifest can be read, that every artefact and the tokenizer have their digests, and that those
which can run code are on the repository's trust list: a file of unknown origin is not taken for one that we built. A
recipe that changes raises its version, which makes a model of another version.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Literal

from tidegate.models.manifest import Manifest
from tidegate.models.repository import Repository, RepositoryError, load_manifest, save_manifest
from tidegate.models.trusted_digests import check_trusted
from tidegate.tools.build.errors import BuildError
from tidegate.tools.build.progress import Progress
from tidegate.tools.build.staging import model_lock, staged_version

# name → (module with `build`, version); the modules import torch and more, so only the one that is built is imported
RECIPES = {
    "minilm": ("tidegate.tools.build.demo.minilm", "2"),
    "digits": ("tidegate.tools.build.demo.digits", "2"),
    "smollm2": ("tidegate.tools.build.demo.smollm2", "1"),
}
STANDARD = ("minilm", "digits")  # what `tidegate up` serves; the others want packages that no extra brings


def build_demo(
    name: str, root: Path, progress: Progress, *, force: bool = False
) -> tuple[Manifest, Literal["kept", "built"]]:
    """Bring demo model `name` into the repository at `root`. Raises BuildError."""
    module, version = RECIPES[name]
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
