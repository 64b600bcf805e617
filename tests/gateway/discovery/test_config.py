"""The section `discovery`: errors name the key and the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from gateway.config.discovery import SourceConfig
from gateway.config.gateway import GatewayConfig


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"source": "file"}, "source: file needs the key path"),
        ({"source": "dns"}, "source: dns needs the key name"),
        ({"source": "file", "path": "x", "every_s": 2}, "source: file has no key every_s; it takes path"),
        ({"source": "dns", "name": "pools.test"}, "the key port is needed"),
        ({"source": "dns", "name": "_a._tcp.b", "port": 1}, "leave port out"),
        ({"source": "dns", "name": "b", "port": 1, "server": "ns.test"}, "server"),
        ({"source": "cloud"}, "source"),
        ({"source": "kubernetes"}, "source: kubernetes needs the key service"),
        ({"source": "kubernetes", "service": "Pools"}, "service"),
        ({"source": "kubernetes", "service": "p", "name": "x"}, "has no key name; it takes service"),
        ({"source": "kubernetes", "service": "p", "server": "http://h"}, "the key namespace is needed"),
        ({"source": "kubernetes", "service": "p", "namespace": "n", "server": "h:1"}, "no URL of an API server"),
        ({"source": "kubernetes", "service": "p", "namespace": "n", "server": "https://u:p@h"}, "no URL"),
        (
            {"source": "kubernetes", "service": "p", "namespace": "n", "server": "http://h", "token_file": "t"},
            "would show the token",
        ),
        ({"source": "announce", "port": 1}, "source: announce has no key port"),
    ],
)
def test_a_source_that_cannot_work_is_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        SourceConfig(**keys)


def test_a_source_is_named_after_what_it_reads() -> None:
    assert SourceConfig(source="file", path=Path("a.yaml")).label == "file:a.yaml"
    assert SourceConfig(source="dns", name="pools.test", port=1).label == "dns:pools.test"
    assert SourceConfig(source="kubernetes", service="pools").label == "kubernetes:pools"
    assert SourceConfig(source="kubernetes", service="pools", namespace="prod").label == "kubernetes:prod/pools"
    assert SourceConfig(source="announce").label == "announce"


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ([{"source": "file", "path": "a"}] * 2, "the source file:a twice"),
        ([{"source": "dns", "name": "b", "port": 1, "tls": True}], "needs the gateway's own section tls"),
        ([{"source": "announce"}], "needs `mqtt`"),
    ],
)
def test_sources_are_checked_against_the_rest(sources: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        GatewayConfig(discovery=sources)  # type: ignore[arg-type]
