"""Triton serving the same graph through nvidia-pytriton; run by the interpreter of `.venv-peers`.

    python triton_server.py MODEL CORE GRPC_PORT HTTP_PORT METRICS_PORT

Only equal shapes join a batch there, so its callers pad to a few lengths (buckets). The wheel brings Triton's core and
its Python back end, not the one for ONNX Runtime. The queue delay of 5 ms was the better one on this workload
(docs/design/numbers.md, "Batching servers"). Imports nothing of Tidegate.
"""

# mypy: ignore-errors
import os
import sys

import numpy as np
import onnxruntime
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

MODEL, CORE, GRPC_PORT, HTTP_PORT, METRICS_PORT = sys.argv[1], *map(int, sys.argv[2:])

options = onnxruntime.SessionOptions()
options.intra_op_num_threads = options.inter_op_num_threads = 1
model = onnxruntime.InferenceSession(MODEL, options, providers=["CPUExecutionProvider"])


@batch
def infer(input_ids, attention_mask):
    if CORE >= 0:
        os.sched_setaffinity(0, {CORE})  # of this thread alone
    return {"sentence_embedding": model.run(None, {"input_ids": input_ids, "attention_mask": attention_mask})[0]}


config = TritonConfig(grpc_port=GRPC_PORT, http_port=HTTP_PORT, metrics_port=METRICS_PORT, log_verbose=0)
with Triton(config=config) as triton:
    triton.bind(
        model_name="minilm",
        infer_func=infer,
        inputs=[
            Tensor(name="input_ids", dtype=np.int64, shape=(-1,)),
            Tensor(name="attention_mask", dtype=np.int64, shape=(-1,)),
        ],
        outputs=[Tensor(name="sentence_embedding", dtype=np.float32, shape=(384,))],
        config=ModelConfig(max_batch_size=32, batcher=DynamicBatcher(max_queue_delay_microseconds=5_000)),
    )
    triton.serve()
