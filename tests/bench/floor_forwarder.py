"""The floor: the least that an HTTP-to-gRPC forwarder in Python can do. No checks, choice, deadline or errors."""

import json
import sys

import grpc
import uvloop
from aiohttp import web

from tidegate.rpc import oip_pb2


def size_of(raw: bytes) -> dict[str, object]:
    return {"parameters": {"binary_data_size": len(raw)}}


async def serve(upstream: str) -> web.Application:
    channel = grpc.aio.insecure_channel(upstream)
    call = channel.unary_unary(
        "/inference.GRPCInferenceService/ModelInfer",
        oip_pb2.ModelInferRequest.SerializeToString,
        oip_pb2.ModelInferResponse.FromString,
    )

    async def infer(request: web.Request) -> web.Response:
        body = await request.read()
        at = int(request.headers["Inference-Header-Content-Length"])
        message = oip_pb2.ModelInferRequest(model_name=request.match_info["model"])
        for entry in json.loads(body[:at])["inputs"]:
            message.inputs.add(name=entry["name"], datatype=entry["datatype"], shape=entry["shape"])
            size = entry["parameters"]["binary_data_size"]
            message.raw_input_contents.append(body[at : at + size])
            at += size
        answer = await call(message)
        outputs = [
            {"name": out.name, "datatype": out.datatype, "shape": list(out.shape), **size_of(raw)}
            for out, raw in zip(answer.outputs, answer.raw_output_contents, strict=True)
        ]
        head = json.dumps({"model_name": answer.model_name, "outputs": outputs}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
        return web.Response(body=head + b"".join(answer.raw_output_contents), headers=headers)

    app = web.Application()
    app.router.add_post("/v2/models/{model}/infer", infer)
    return app


if __name__ == "__main__":
    uvloop.install()
    announce = lambda _: print(json.dumps({"event": "ready"}), flush=True)  # noqa: E731
    web.run_app(serve(sys.argv[1]), host="127.0.0.1", port=int(sys.argv[2]), access_log=None, print=announce)
