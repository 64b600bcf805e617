"""A mistyped `tidegate-*` header is named in the answer, on each front."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc.aio as tritongrpc_aio
import tritonclient.http.aio as tritonhttp_aio

from tests.support.serving.oip_servers import Servers
from tidegate.oip.call import kept_headers
from tidegate.oip.unknown_headers import KNOWN, WARNING_KEY, warn_of_unknown

HEADERS_DOC = Path(__file__).parents[3] / "docs" / "headers.md"
TYPO = {"tidegate-bugdet-ms": "5000"}
SAID = "unknown tidegate-bugdet-ms, did you mean tidegate-budget-ms"


def warned(**headers: str) -> str | None:
    words: dict[str, str] = {}
    warn_of_unknown(words, kept_headers((name.replace("_", "-"), value) for name, value in headers.items()))
    return words.get(WARNING_KEY)


def test_known_headers_and_those_of_others_are_no_warning() -> None:
    assert warned() is None
    assert warned(tidegate_budget_ms="5", tidegate_pin="edge", tidegate_hop="gateway", x_other="1") is None
    assert warned(traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01") is None


def test_at_most_three_are_named_and_none_at_length() -> None:
    text = warned(Tidegate_Bugdet_Ms="5", **{f"tidegate-{'x' * 500}{number}": "1" for number in range(50)})
    assert text is not None and text.startswith(SAID)
    assert text.count("unknown") == 3
    assert len(text) < 300


def test_every_documented_request_header_is_known() -> None:
    documented = set(re.findall(r"header (?:or OIP parameter )?`(tidegate-[a-z-]+): ", HEADERS_DOC.read_text()))
    assert len(documented) >= 7
    assert documented <= KNOWN


@pytest.mark.clients
async def test_tritonclient_sees_the_warning_over_both_protocols(servers: Servers) -> None:
    for module, address in ((tritonhttp_aio, servers.http), (tritongrpc_aio, servers.grpc)):
        inputs = [module.InferInput(name, [1, 4], "INT64") for name in ("input_ids", "attention_mask")]
        for one in inputs:
            one.set_data_from_numpy(np.ones((1, 4), dtype=np.int64))
        async with module.InferenceServerClient(address) as client:
            for headers, expected in ((TYPO, SAID), ({"tidegate-budget-ms": "5000"}, None)):
                answer = await client.infer("minilm", inputs, headers=dict(headers))  # it adds its own
                if module is tritonhttp_aio:
                    assert answer.get_response()["parameters"].get(WARNING_KEY) == expected
                else:
                    found = answer.get_response().parameters
                    assert (found[WARNING_KEY].string_param if WARNING_KEY in found else None) == expected
