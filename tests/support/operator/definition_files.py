"""Writes the CustomResourceDefinitions into the chart's `crds/`, from which Helm installs them.

    python -m tests.support.operator.definition_files

They are generated from the specs and the configuration models. A test holds the files against what they generate.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tidegate.tools.operator.cli import definition_yaml
from tidegate.tools.operator.definitions import KINDS

FOLDER: Final = Path(__file__).parents[3] / "deploy" / "helm" / "tidegate" / "crds"
_HEAD: Final = (
    "# Generated: python -m tests.support.operator.definition_files; `tidegate operator crds` prints the same.\n"
)


def texts() -> dict[str, str]:
    """The files as they should be, by name."""
    return {f"{kind.plural}.yaml": _HEAD + definition_yaml(kind.name) for kind in KINDS}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in texts().items():
        (FOLDER / name).write_text(text)
