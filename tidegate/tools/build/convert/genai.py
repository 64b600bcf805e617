"""Converts a Hugging Face folder into ONNX for onnxruntime-genai, with int4 or int8 weights, by its own builder.

The builder is a program of the package; it runs as a child, so that what it prints, allocates and patches stays there,
and ends with us, also where we are killed: it would go on for minutes, with gigabytes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tidegate.tools.build.errors import BuildError

MODEL: Final = "model.onnx"
DATA: Final = "model.onnx.data"
CONFIG: Final = "genai_config.json"
FILES: Final = (MODEL, DATA, CONFIG)
PACKAGES: Final = ("onnxruntime_genai", "onnx", "onnx_ir", "torch", "transformers")
_BUILDER: Final = """
import runpy, signal, sys
from tidegate.runtime.lifeline import die_with_parent
die_with_parent(int(sys.argv.pop(1)), by=signal.SIGKILL)
runpy.run_module("onnxruntime_genai.models.builder", run_name="__main__", alter_sys=True)
"""
_TAIL_LINES: Final = 12
_TIMEOUT_S: Final = 1800.0


def convert_to_genai(source: Path, folder: Path, *, precision: str = "int4") -> None:
    """Write `FILES` into `folder`; `source` holds weights, configuration and tokenizer.

    Raises:
        BuildError: the package is not installed, or its builder does not know the architecture.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".genai-") as scratch:
        made = Path(scratch) / "made"
        command = [sys.executable, "-P", "-c", _BUILDER, str(os.getpid()), "-i", str(source), "-o", str(made)]
        command += ["-p", precision, "-e", "cpu", "-c", str(Path(scratch) / "cache")]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        environment["ORT_DISABLE_TELEMETRY"] = "1"
        environment["GIT_DIR"] = os.devnull  # it writes the commit of whatever checkout it lies in into the model
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
            )
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{source}: onnxruntime-genai's builder took more than {_TIMEOUT_S:g} s") from error
        if "No module named" in done.stderr:
            missing = done.stderr.strip().rpartition("No module named ")[2]
            raise BuildError(f"converting to {precision} needs {missing}: pip install 'tidegate[build,edge-llm]'")
        if done.returncode != 0:
            tail = "\n".join(done.stderr.strip().splitlines()[-_TAIL_LINES:])
            raise BuildError(f"{source}: onnxruntime-genai's builder failed:\n{tail}")
        for name in FILES:
            if not (made / name).is_file():
                raise BuildError(f"{source}: onnxruntime-genai's builder made no {name}")
            os.replace(made / name, folder / name)
