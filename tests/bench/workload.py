"""The request that overhead is measured with: one short text for a MiniLM-shaped model, and its answer.

It is what the main job sends: two INT64 inputs with bounded values, so the gateway checks every element, and one
FP32 vector back, in the binary tensor format of tritonclient's HTTP client.
"""

from __future__ import annotations

import json
import struct

from tidegate.types import Datatype, InferRequest, InferResponse, Tensor

MODEL = "bench"
TOKENS = 16
WIDTH = 384
INPUT_IDS = struct.pack(f"<{TOKENS}q", *range(100, 100 + TOKENS))
ATTENTION_MASK = struct.pack(f"<{TOKENS}q", *([1] * TOKENS))
EMBEDDING = struct.pack(f"<{WIDTH}f", *[index / WIDTH for index in range(WIDTH)])

MANIFEST = f"""\
name: {MODEL}
version: "1"
axes:
  batch: {{min: 1, max: 32}}
  sequence: {{min: 1, max: 256}}
inputs:
  - {{name: input_ids, datatype: INT64, shape: [batch, sequence], bounds: {{min: 0, max: 30521}}}}
  - {{name: attention_mask, datatype: INT64, shape: [batch, sequence], bounds: {{min: 0, max: 1}}}}
outputs:
  - {{name: sentence_embedding, datatype: FP32, shape: [batch, {WIDTH}]}}
variants:
  - name: fp32
    artefact: none.onnx
    engine: onnx
    precision: fp32
    where: [edge, pool]
    sha256: "{"0" * 64}"
    size_bytes: 1
cost: {{feature: tokens, input: input_ids}}
default_budget_s: 10.0
"""


def request() -> InferRequest:
    shape = (1, TOKENS)
    return InferRequest(
        MODEL,
        (
            Tensor("input_ids", Datatype.INT64, shape, INPUT_IDS),
            Tensor("attention_mask", Datatype.INT64, shape, ATTENTION_MASK),
        ),
    )


def response() -> InferResponse:
    return InferResponse(MODEL, "1", (Tensor("sentence_embedding", Datatype.FP32, (1, WIDTH), EMBEDDING),))


def http_request(host: str) -> bytes:
    """The whole HTTP request as tritonclient words it: JSON first, then the tensors' bytes."""
    inputs = [
        {
            "name": tensor.name,
            "shape": list(tensor.shape),
            "datatype": tensor.datatype.value,
            "parameters": {"binary_data_size": len(tensor.raw)},
        }
        for tensor in request().inputs
    ]
    outputs = [{"name": "sentence_embedding", "parameters": {"binary_data": True}}]
    head = json.dumps({"inputs": inputs, "outputs": outputs}, separators=(",", ":")).encode()
    body = head + INPUT_IDS + ATTENTION_MASK
    return (
        f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/octet-stream\r\n"
        f"Inference-Header-Content-Length: {len(head)}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body
