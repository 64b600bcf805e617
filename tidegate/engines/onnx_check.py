"""Checks whether an ONNX file may be loaded: `python -m tidegate.engines.onnx_check FILE MODEL_YAML VARIANT PARENT`.

It runs as a process of its own with bounded memory, time and files, since the file came over a network and the runtime
is native code. The engine walks the file's bytes before the runtime sees them, as it does wherever an ONNX file is
loaded (`onnx_wire.py`). The session that it then makes proves that this very runtime can, and what the graph takes and
gives is compared with the manifest.

It prints one line of JSON, {"problem": ""} if there is none; its parent treats missing output as a problem, too. It
ends with its parent, whose process id it is given: nobody else waits for it.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path
from typing import Any, Final

from tidegate.engines.errors import EngineError
from tidegate.engines.onnx import OnnxEngine, OnnxPort, checked_copy
from tidegate.models.manifest import Manifest, TensorSpec
from tidegate.models.repository import RepositoryError, parse_manifest
from tidegate.runtime.lifeline import die_with_parent
from tidegate.types import Datatype

CPU_S: Final = 100
_RUNTIME_BYTES: Final = 3 << 30  # of addresses, not of memory: the runtime's libraries and arenas
_PER_FILE: Final = 8
_DATATYPES: Final = {
    "tensor(bool)": Datatype.BOOL, "tensor(uint8)": Datatype.UINT8, "tensor(uint16)": Datatype.UINT16,
    "tensor(uint32)": Datatype.UINT32, "tensor(uint64)": Datatype.UINT64, "tensor(int8)": Datatype.INT8,
    "tensor(int16)": Datatype.INT16, "tensor(int32)": Datatype.INT32, "tensor(int64)": Datatype.INT64,
    "tensor(float16)": Datatype.FP16, "tensor(float)": Datatype.FP32, "tensor(double)": Datatype.FP64,
    "tensor(bfloat16)": Datatype.BF16, "tensor(string)": Datatype.BYTES,
}  # fmt: skip


def problem_of(artefact: Path, manifest: Manifest, variant: str, *, copied: str | bytes | None = None) -> str:
    """What is wrong with the file, or with the copy of it that was checked; "" when nothing is."""
    try:
        engine = OnnxEngine(artefact, copied=copied)
    except EngineError as error:
        return str(error).removeprefix(f"{artefact}: ")
    if next(one for one in manifest.variants if one.name == variant).packed is not None:
        return ""  # takes its rows in a form that the manifest's shapes do not describe
    inputs = _mismatch("input", manifest.inputs, engine.input_ports)
    return inputs or _mismatch("output", manifest.outputs, engine.output_ports)


def _mismatch(kind: str, specs: tuple[TensorSpec, ...], ports: tuple[OnnxPort, ...]) -> str:
    """How the graph's ports differ from the manifest's tensors."""
    by_name = {spec.name: spec for spec in specs}
    wanted = {spec.name for spec in specs if not spec.optional}
    there = {port.name for port in ports}
    if not wanted <= there or (kind == "input" and not there <= set(by_name)):
        return f"its {kind}s are {', '.join(sorted(there))}; the manifest's are {', '.join(sorted(by_name))}"
    for port in ports:
        spec = by_name.get(port.name)
        if spec is not None and (_DATATYPES.get(port.kind) is not spec.datatype or not _fits(spec, port.shape)):
            shape = f"{spec.datatype.value}{list(spec.shape)}"
            return f"its {kind} {port.name!r} is {port.kind}{list(port.shape)}; the manifest says {shape}"
    return ""


def _fits(spec: TensorSpec, shape: tuple[Any, ...]) -> bool:
    """Whether both have as many axes, and the same lengths wherever both are fixed."""
    if not shape and spec.shape:
        return True  # the file does not say
    pairs = zip(spec.shape, shape, strict=False)
    return len(spec.shape) == len(shape) and all(
        not (isinstance(ours, int) and isinstance(theirs, int)) or ours == theirs for ours, theirs in pairs
    )


def _confine(artefact: Path) -> None:
    """From here on this process can spend only so much."""
    room = _RUNTIME_BYTES + _PER_FILE * artefact.stat().st_size
    for what, limit in ((resource.RLIMIT_AS, room), (resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_CORE, 0),
                        (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NOFILE, 64)):  # fmt: skip
        resource.setrlimit(what, (limit, limit))


def main() -> None:
    artefact, manifest_path, variant = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    die_with_parent(int(sys.argv[4]), by=signal.SIGKILL)
    try:
        manifest = parse_manifest(manifest_path.read_text(encoding="utf-8"), manifest_path).of_model
        with checked_copy(artefact) as copied:
            _confine(artefact)
            problem = problem_of(artefact, manifest, variant, copied=copied)
    except EngineError as error:
        problem = str(error).removeprefix(f"{artefact}: ")
    except (OSError, RepositoryError, MemoryError) as error:
        problem = str(error) or type(error).__name__
    print(json.dumps({"problem": problem}), flush=True)


if __name__ == "__main__":
    main()
