"""Asks a gateway through kserve's own clients, in an environment of theirs: `python kserve_client.py HTTP GRPC`.

A program and no module: kserve and tritonclient cannot be imported into one process (both define the same protobuf
messages), and kserve pins versions that the tests' environment must not have.
"""

from __future__ import annotations

import asyncio
import json
import sys

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig


def request(binary: bool) -> InferRequest:
    ids = np.array([[101, 7592, 2088, 102]], dtype=np.int64)
    inputs = []
    for name, array in (("input_ids", ids), ("attention_mask", np.ones_like(ids))):
        one = InferInput(name, list(array.shape), "INT64")
        one.set_data_from_numpy(array, binary_data=binary)
        inputs.append(one)
    return InferRequest(model_name="minilm", infer_inputs=inputs)


async def ask(http: str, grpc: str) -> None:
    rest = InferenceRESTClient(RESTConfig(protocol="v2"))
    said = {
        "live": await rest.is_server_live(http),
        "ready": await rest.is_server_ready(http),
        "model": await rest.is_model_ready(http, "minilm"),
        "rest": list((await rest.infer(http, request(binary=False), model_name="minilm")).outputs[0].shape),
        "rest_binary": list((await rest.infer(http, request(binary=True), model_name="minilm")).outputs[0].shape),
    }
    async with InferenceGRPCClient(grpc) as client:
        said["grpc_ready"] = await client.is_server_ready()
        said["grpc"] = list((await client.infer(request(binary=True))).outputs[0].shape)
    print(json.dumps(said))


if __name__ == "__main__":
    asyncio.run(ask(*sys.argv[1:]))
