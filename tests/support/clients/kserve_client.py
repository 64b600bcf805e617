"""Everything kserve's own client does, against a server of ours; prints one JSON object of what it saw.

Run by an interpreter that has kserve: `python kserve_client.py HTTP_ADDRESS GRPC_ADDRESS`. In a process of its own,
because kserve's generated messages clash with tritonclient's.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

import grpc
import httpx
import numpy as np
from kserve import InferInput, InferRequest
from kserve.inference_client import InferenceGRPCClient, InferenceRESTClient, RESTConfig

logging.disable(logging.CRITICAL)


def request(binary: bool, mask: bool = True, model: str = "minilm", typed: bool = False) -> InferRequest:
    ids = np.arange(4, dtype=np.int64).reshape(1, 4)
    inputs = []
    for name, array in (("input_ids", ids), ("attention_mask", np.ones_like(ids)))[: 2 if mask else 1]:
        tensor = InferInput(name, list(array.shape), "INT64")
        if typed:
            tensor.data = array.reshape(-1).tolist()
        else:
            tensor.set_data_from_numpy(array, binary_data=binary)
        inputs.append(tensor)
    return InferRequest(model_name=model, infer_inputs=inputs, request_id="q7")


def seen(response: Any) -> dict[str, Any]:
    output = response.outputs[0]
    parameters = response.parameters or {}
    served_by = parameters["tidegate-served-by"]
    return {
        "id": response.id,
        "model": response.model_name,
        "first": float(output.as_numpy()[0, 0]),
        "shape": list(output.shape),
        "served_by": served_by if isinstance(served_by, str) else served_by.string_param,
    }


async def by_rest(address: str) -> dict[str, Any]:
    base, found = f"http://{address}", {}
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    found["live"] = await client.is_server_live(base)
    found["ready"] = await client.is_server_ready(base)
    found["model_ready"] = await client.is_model_ready(base, "minilm")
    for name, binary in (("json", False), ("binary", True)):
        found[name] = seen(await client.infer(base, request(binary), model_name="minilm"))
    for name, bad in (("error", request(True, mask=False)), ("unknown", request(True, model="nobody"))):
        try:
            await client.infer(base, bad, model_name=bad.model_name)
        except httpx.HTTPStatusError as error:
            found[name] = str(error)
    await client.close()
    return found


async def by_grpc(address: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    client = InferenceGRPCClient(url=address)
    found["live"] = await client.is_server_live()
    found["ready"] = await client.is_server_ready()
    found["model_ready"] = await client.is_model_ready("minilm")
    found["raw"] = seen(await client.infer(request(True)))
    found["typed"] = seen(await client.infer(request(False, typed=True)))
    for name, bad in (("error", request(True, mask=False)), ("unknown", request(True, model="nobody"))):
        try:
            await client.infer(bad)
        except grpc.RpcError as error:
            found[name] = [error.code().name, error.details()]
    await client.close()
    return found


async def main() -> None:
    print(json.dumps({"rest": await by_rest(sys.argv[1]), "grpc": await by_grpc(sys.argv[2])}))


asyncio.run(main())
