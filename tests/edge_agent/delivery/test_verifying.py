"""A generating model arrives with all of its files, or is refused by the name of the one that is missing."""

from __future__ import annotations

import asyncio
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from edge_agent.delivery.failures import WorkFailed
from edge_agent.delivery.model_store import ModelStore
from edge_agent.delivery.verifying import verify
from tests.support.models.artefacts import artefact_of
from tests.support.models.generative import talker
from tests.support.models.pipelines import weather_repository
from tests.support.models.talking import save_talker
from tidegate.generate.teacher_forcing import KnownAnswer
from tidegate.models.manifest import ArtefactFile, Manifest
from tidegate.models.repository import Repository, RepositoryError, save_manifest
from tidegate.models.trust import TRUSTED
from tidegate.rollout.golden import encode_golden
from tidegate.rollout.golden_prompts import GoldenPrompts, encode_prompts
from tidegate.rollout.plan import Artefact, ModelPlan, Probe
from tidegate.tools.delivery.files import LocalArtefact, files_of
from tidegate.types import Datatype

NAMES = {"generation.yaml", "weights.bin", "tokenizer.json", "chat_template.jinja"}


def talker_with_files(root: Path, base: Manifest | None = None) -> Manifest:
    """`talker` with one more file of its variant, a tokenizer and a template."""
    manifest = save_talker(root, base or talker(), ((1.0, 5.0),), slots=4, cache_bytes=1)
    folder = root / manifest.name / manifest.version
    texts = {name: name.encode() for name in NAMES - {"generation.yaml"}}
    for name, raw in texts.items():
        (folder / name).write_bytes(raw)
    digests = {name: sha256(raw).hexdigest() for name, raw in texts.items()}
    assert manifest.generative is not None
    weights = ArtefactFile("weights.bin", digests["weights.bin"], len(texts["weights.bin"]))
    whole = replace(
        manifest,
        variants=(replace(manifest.variants[0], files=(weights,)),),
        generative=replace(
            manifest.generative,
            tokenizer_sha256=digests["tokenizer.json"],
            chat_template_sha256=digests["chat_template.jinja"],
        ),
    )
    save_manifest(folder, whole)
    return whole


def arrived(root: Path, found: tuple[LocalArtefact, ...]) -> tuple[ModelStore, ModelPlan]:
    """A store in which these files are, and the plan that they came by."""
    store = ModelStore(root)
    store.prepare()
    for one in found:
        store.path(one.artefact.sha256).write_bytes(one.path.read_bytes())
    (manifest,) = (one.artefact.sha256 for one in found if one.artefact.path == "model.yaml")
    return store, ModelPlan("1", manifest, tuple(one.artefact for one in found))


def checked(plan: ModelPlan, store: ModelStore, model: str = "talker") -> str:
    """The problem; "" where there is none."""
    try:
        asyncio.run(verify(model, plan, store, TRUSTED))
    except WorkFailed as error:
        return str(error)
    return ""


def test_a_generating_model_needs_its_variants_files_its_tokenizer_and_its_template(tmp_path: Path) -> None:
    manifest = talker_with_files(tmp_path / "models")
    found = files_of(Repository(tmp_path / "models"), manifest)
    assert {one.artefact.path for one in found} == NAMES | {"model.yaml"}
    store, plan = arrived(tmp_path / "store", found)
    assert checked(plan, store) == ""

    def other(one: Artefact) -> Artefact:
        return replace(one, sha256="0" * 64)

    for name in NAMES:
        missing = replace(plan, files=tuple(one for one in plan.files if one.path != name))
        assert f"the plan has no file '{name}'" in checked(missing, store)
        changed = replace(plan, files=tuple(other(one) if one.path == name else one for one in plan.files))
        assert f"the plan has no file '{name}'" in checked(changed, store)


@pytest.mark.slow
def test_a_pipeline_needs_the_files_of_its_steps(tmp_path: Path) -> None:
    manifest = weather_repository(tmp_path / "models", {"redact": b"\0asm one", "clip": b"\0asm another"})
    store, plan = arrived(tmp_path / "store", files_of(Repository(tmp_path / "models"), manifest))
    assert checked(plan, store, "weather") == ""
    for name in ("redact.wasm", "tokenizer.json", "clip.wasm", "labels.txt"):
        missing = replace(plan, files=tuple(one for one in plan.files if one.path != name))
        assert f"the plan has no file '{name}'" in checked(missing, store, "weather")


def test_golden_prompts_have_to_fit_the_model(tmp_path: Path) -> None:
    manifest = talker_with_files(tmp_path / "models")
    store, plan = arrived(tmp_path / "store", files_of(Repository(tmp_path / "models"), manifest))
    assert manifest.generative is not None
    good = GoldenPrompts(manifest.generative.vocabulary, "paced", (KnownAnswer((5,), (6, 7)),))
    cases = encode_golden([({"x": np.ones((1, 3), np.float32)},) * 2], {"x": Datatype.FP32})
    for raw, words in (
        (encode_prompts(good), ""),
        (encode_prompts(replace(good, vocabulary="0" * 64)), "golden: they are of the vocabulary 000000000000"),
        (cases, "golden: no golden prompts: "),
    ):
        golden = artefact_of("golden.msgpack", raw)
        store.path(golden.sha256).write_bytes(raw)
        found = checked(replace(plan, probe=Probe(golden=golden)), store)
        assert words in found if words else not found


def test_a_version_whose_files_are_not_all_there_is_not_shipped(tmp_path: Path) -> None:
    manifest = talker_with_files(tmp_path / "models")
    (tmp_path / "models" / "talker" / "1" / "weights.bin").write_bytes(b"other")
    with pytest.raises(RepositoryError, match=r"weights\.bin"):
        files_of(Repository(tmp_path / "models"), manifest)
