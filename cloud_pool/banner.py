"""The serving banner shows a person the pool's models, its address, and an example call to copy.

A pool by itself is a whole inference server for one machine, so an operator who starts one by hand should be able to
call it without the manual. A pool that a parent starts (`tidegate up`) prints none: the parent reads the `ready` event.

Pure: values in, lines out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tidegate.fleet.offers import ModelOffer
from tidegate.models.generative import PROMPT_INPUT
from tidegate.models.manifest import Manifest, TensorSpec

_NUMPY: Final = {
    "BYTES": "object", "BOOL": "bool", "FP16": "float16", "BF16": "float32", "FP32": "float32", "FP64": "float64",
}  # fmt: skip


def serving_banner(name: str, address: str, device: str, models: Sequence[tuple[Manifest, ModelOffer]]) -> list[str]:
    """Lines for a person: the models with their signatures and costs, and how to call the first of them."""
    lines = [f"pool/{name} serves {len(models)} model{'s' * (len(models) != 1)} on {device}, at {address} (OIP gRPC)"]
    for manifest, offer in models:
        lines.append(f"  {manifest.name} {manifest.version}: {_signature(manifest)}{_costs(offer)}")
    return [*lines, *_example(models[0][0], address), *_behind_a_gateway(name, address)]


def _signature(manifest: Manifest) -> str:
    inputs, outputs = ", ".join(map(_tensor, manifest.inputs)), ", ".join(map(_tensor, manifest.outputs))
    return f"{inputs} → {outputs}"


def _tensor(spec: TensorSpec) -> str:
    return f"{spec.name} {spec.datatype.value}[{', '.join(map(str, spec.shape))}]"


def _costs(offer: ModelOffer) -> str:
    """Each variant with the least that a call of it took at warm-up."""
    variants = [
        f"{variant.name} from {min(seconds for _, seconds in variant.cost) * 1e3:.3g} ms"
        if variant.cost
        else variant.name
        for variant in offer.variants
    ]
    return f"  ({', '.join(variants)})"


def _example(manifest: Manifest, address: str) -> list[str]:
    lines = ["Ask it with any client of the Open Inference Protocol, for example `pip install tritonclient[grpc]`:"]
    lines += ["    import numpy as np, tritonclient.grpc as triton"]
    names = []
    asked = [spec for spec in manifest.inputs if manifest.generative is None or spec.name == PROMPT_INPUT]
    for index, spec in enumerate(asked):
        shape = [_length(entry, manifest) for entry in spec.shape]
        dtype = _NUMPY.get(spec.datatype.value, spec.datatype.value.lower())
        zeros = f"np.zeros({shape}, np.{dtype})"
        lines += [f"    i{index} = triton.InferInput({spec.name!r}, {shape}, {spec.datatype.value!r})"]
        lines += [f"    i{index}.set_data_from_numpy({zeros})"]
        names.append(f"i{index}")
    wait = "client_timeout=1.0" if manifest.generative is None else "parameters={'max_tokens': 16}"
    call = f"infer({manifest.name!r}, [{', '.join(names)}], {wait})"
    return [*lines, f"    print(triton.InferenceServerClient({address!r}).{call}.get_response())"]


def _length(entry: int | str, manifest: Manifest) -> int:
    return entry if isinstance(entry, int) else max(1, manifest.axes[entry].min)


def _behind_a_gateway(name: str, address: str) -> list[str]:
    target = f"{{name: {name}, tier: pool, address: {address!r}}}"
    return [
        "Or put a gateway in front of it, which knows deadlines, HTTP and OpenAI's API:",
        f"    targets: [{target}]",
    ]
