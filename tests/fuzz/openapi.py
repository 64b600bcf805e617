"""schemathesis against a whole gateway: whether its answers are those that the OpenAPI document promises.

It runs as people run it, as a process that fetches `/openapi.json` and asks every operation for what the document
allows and for what it does not. Five promises are held against each answer: no 5xx that is a defect, and a status, a
content type, headers and a body that the document names for this operation.

The gateway is a real one before one target, with a model of each kind: MiniLM's and the digits' shapes, and one that
mirrors every datatype. Random names would only ever meet 404, so names of models come mostly from a dictionary.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import BertPreTokenizer

from gateway.app import Gateway
from gateway.config.gateway import GatewayConfig
from tests.support.gateway.app import Far, running, target
from tests.support.serving.host import FakeHost
from tidegate.fleet.offers import ModelOffer, VariantOffer

NAME = "openapi"
TOOL = Path(__file__).parents[2] / ".venv-checks" / "bin" / "schemathesis"
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance"
)
# 501, 503 and 504 are answers of the protocol here (not served, nothing alive, late), and 502 and 500 never are.
_CONFIG = """
[dictionaries.models]
values = ["minilm", "digits", "mirror"]
[dictionaries.versions]
values = ["1", "3"]
[parameters]
"path.model" = { dictionary = "models", probability = 0.8 }
"path.version" = { dictionary = "versions", probability = 0.8 }
"body.model" = { dictionary = "models", probability = 0.8 }
"tidegate-require" = { dictionary = "require", probability = 0.2 }
[dictionaries.require]
values = ["attested"]
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", "501", "503", "504"]
"""


class AnyModel(Far):
    """A target that answers for the models of a `FakeHost`."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.host: Any = FakeHost()
        points = ((1.0, 0.002), (100.0, 0.004))
        self.offers = tuple(
            ModelOffer(one.name, one.version, (VariantOffer("fp32", "fp32", points, None),))
            for one in self.host.manifests()
        )

    def keep_in(self, repository: Path) -> Path:
        for manifest in self.host.manifests():
            home = repository / manifest.name / manifest.version
            home.mkdir(parents=True)
            (home / "model.yaml").write_text(yaml.safe_dump(msgspec.to_builtins(manifest)))
            if manifest.text is not None:
                words: Any = Tokenizer(WordPiece({"[UNK]": 0, "hello": 1}, unk_token="[UNK]"))
                words.pre_tokenizer = BertPreTokenizer()
                words.save(str(home / manifest.text.tokenizer))
        return repository


@asynccontextmanager
async def answering(folder: Path) -> AsyncIterator[tuple[Gateway, AnyModel]]:
    far = AnyModel("pool/main")
    ports: dict[str, Any] = dict.fromkeys(("http_port", "grpc_port", "metrics_port", "admin_port"), 0)
    models = far.keep_in(folder / "models")
    async with (
        running(far),
        Gateway(GatewayConfig(model_repository=models, targets=(target(far),), **ports)) as gateway,
    ):
        await gateway.static_targets_tried(30.0)
        yield gateway, far


async def conformance(
    folder: Path,
    url: str,
    *,
    most_examples: int,
    for_s: int | None = None,
    seed: int | None = None,
    paths: tuple[str, ...] = (),
) -> tuple[int, str]:
    """schemathesis' status and words. Without a seed it draws its own, and says which.

    Args:
        paths: of the operations that are asked, as the document writes them; empty: all.
    """
    config = folder / "schemathesis.toml"
    config.write_text(_CONFIG)
    command = [
        "--config-file", str(config), "run", f"{url}/openapi.json", "--checks", CHECKS,
        "--phases", "examples,coverage,fuzzing",
        "--max-examples", str(most_examples), "--request-timeout", "10", "--workers", "1", "--warnings", "off",
        "--no-color", "--continue-on-failure", "--generation-database", "none",
    ]  # fmt: skip
    command += ["--seed", str(seed)] if seed is not None else []
    command += ["--max-time", str(for_s)] if for_s is not None else []
    command += [word for path in paths for word in ("--include-path", path)]
    process = await asyncio.create_subprocess_exec(
        TOOL, *command, cwd=folder, env={**os.environ, "NO_COLOR": "1"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        told, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, told.decode(errors="replace")


def asked(told: str) -> int:
    """How many requests schemathesis says that it made."""
    found = re.search(r"(\d+) generated", told)
    return int(found[1]) if found else 0
