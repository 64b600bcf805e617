"""A repository with a generating model whose weights nobody computes with: for the server that replays vLLM's answers.

Its vocabulary and its stop token are those of the model that the answers were recorded of.
"""

from __future__ import annotations

import json
from pathlib import Path

from msgspec.structs import replace

from tests.support.models.generative import COST, TALKER, talker
from tidegate.models.digest import sha256_of
from tidegate.models.manifest import ArtefactFile
from tidegate.models.repository import save_manifest

VOCABULARY_SIZE = 49152
CONTEXT = 2048
STOP = 2


def write_replayed_folder(folder: Path, **config: object) -> Path:
    """The weights' file, beside its config.json and files that a server must not see."""
    folder.mkdir(parents=True)
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    weights = folder / "model.safetensors"
    weights.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    said = {"vocab_size": VOCABULARY_SIZE, "max_position_embeddings": 8192, "eos_token_id": STOP, **config}
    (folder / "config.json").write_text(json.dumps(said))
    (folder / "generation_config.json").write_text('{"temperature": 0.1}')
    return weights


def replayed_repository(root: Path, *, slots: int = 4) -> Path:
    """Write `talker` below `root`, which is returned."""
    manifest = talker(context=CONTEXT, vocabulary_size=VOCABULARY_SIZE, stop_tokens=(STOP,))
    folder = root / manifest.name / manifest.version
    weights = write_replayed_folder(folder)
    config = folder / "config.json"
    variant = replace(
        TALKER.variants[0],
        name="bf16",
        engine="transformers",
        precision="bf16",
        where=("pool",),
        artefact=weights.name,
        sha256=sha256_of(weights),
        size_bytes=weights.stat().st_size,
        files=(ArtefactFile(config.name, sha256_of(config), config.stat().st_size),),
        generation=replace(COST, slots=slots, cache_bytes=1024),
    )
    save_manifest(folder, replace(manifest, variants=(variant,)))
    return root
