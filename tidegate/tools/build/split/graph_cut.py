"""A cut of an ONNX graph is a tensor through which every way from the private input to the outputs leads.

Nodes are walked in their order, which ONNX demands to be topological. *Hot* is what depends on the private input. When
after some node the only hot tensor that a later node still reads is the one just made, nothing else of the input gets
past that point: the tensor is a cut. In a residual block the block's own input is still to be read, so that no cut is
found inside of it. What depends on other inputs alone, such as a mask, is computed on both sides from those inputs.

    cuts(graph)      O(nodes + edges)
    head             the ancestors of the tensor             inputs: those that they read
    tail             the ancestors of the outputs, up to it  inputs: the tensor, and those that they read beside it

Weights go with the nodes that read them. The opset, foreign domains and the names of all tensors stay as they are.
A graph with branches or loops in a node is refused: a tensor may be read inside of them, unseen.

It can be wrong only where a graph is: a node that reads what a later one makes is no valid ONNX.
Source: Hu et al., "Dynamic Adaptive DNN Surgery for Inference Acceleration on the Edge" (DADS), INFOCOM 2019, of which
this is the case of cuts one tensor wide; Kang et al., "Neurosurgeon", ASPLOS 2017.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import onnx

from tidegate.tools.build.errors import BuildError


def cut_tensors(graph: onnx.GraphProto, private: str, path: Path) -> tuple[str, ...]:
    """The tensors at which the graph may be cut, in the order in which they are computed.

    Args:
        private: the input that must not get past the cut. `path` is for errors.

    Raises:
        BuildError: the graph has no such input, or control flow.
    """
    inputs = {one.name for one in graph.input}
    if private not in inputs:
        raise BuildError(f"{path}: has no input {private!r} (inputs: {', '.join(sorted(inputs)) or 'none'})")
    _refuse_control_flow(graph, path)
    readers = Counter(name for node in graph.node for name in set(node.input) if name)
    outputs = {one.name for one in graph.output}
    hot = {private: readers[private]}  # what depends on the private input → nodes that are still to read it
    found = []
    for node in graph.node:
        depends = any(name in hot for name in node.input)
        for name in set(node.input):
            if name in hot:
                hot[name] -= 1
        if not depends:
            continue
        hot |= {name: readers[name] for name in node.output if name}
        live = [name for name, left in hot.items() if left > 0 or name in outputs]
        if len(live) == 1 and live[0] in node.output and live[0] not in outputs:
            found.append(live[0])
    return tuple(found)


def head_of(model: onnx.ModelProto, tensor: str) -> onnx.ModelProto:
    """The part of the model that computes `tensor`, with it as its output.

    Raises:
        BuildError: no node of the model makes it.
    """
    made = {name for node in model.graph.node for name in node.output}
    if tensor not in made:
        raise BuildError(f"no node makes the tensor {tensor!r}")
    return _part(model, wanted=(tensor,), given=(), outputs=(_float_port(tensor),))


def tail_of(model: onnx.ModelProto, tensor: str) -> onnx.ModelProto:
    """The part of the model behind `tensor`, with it as its first input."""
    outputs = tuple(model.graph.output)
    return _part(model, wanted=[one.name for one in outputs], given=(tensor,), outputs=outputs)


def _part(
    model: onnx.ModelProto, *, wanted: Collection[str], given: Collection[str], outputs: Sequence[onnx.ValueInfoProto]
) -> onnx.ModelProto:
    """The nodes that `wanted` needs where `given` is there already, as a model."""
    graph, needed, kept = model.graph, set(wanted), []
    for node in reversed(graph.node):
        if any(name in needed and name not in given for name in node.output):
            kept.append(node)
            needed.update(name for name in node.input if name)
    weights = [one for one in graph.initializer if one.name in needed]
    names = {one.name for one in weights}
    own = [one for one in graph.input if one.name in needed and one.name not in names]
    part = onnx.helper.make_graph(
        list(reversed(kept)),
        f"{graph.name or 'graph'}-part",
        [*map(_float_port, given), *own],
        list(outputs),
        initializer=weights,
    )
    made = onnx.helper.make_model(part, opset_imports=list(model.opset_import), producer_name="tidegate")
    made.ir_version = model.ir_version
    made.functions.extend(model.functions)
    return made


def _float_port(name: str) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)


def _refuse_control_flow(graph: onnx.GraphProto, path: Path) -> None:
    flow = sorted({node.op_type for node in graph.node if _has_graph(node.attribute)})
    if flow:
        raise BuildError(
            f"{path}: has control flow ({', '.join(flow)}), inside of which a tensor may be read unseen; "
            "export the model without it"
        )


def _has_graph(attributes: Iterable[onnx.AttributeProto]) -> bool:
    return any(one.HasField("g") or one.graphs for one in attributes)
