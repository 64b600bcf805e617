"""mosec serving the same graph, as its own documentation would have it; run by the interpreter of `.venv-peers`.

    BENCH_MODEL=… BENCH_CORE=… BENCH_MAX_BATCH=… python mosec_server.py --port PORT

Its worker processes import this file anew, without arguments, hence the environment.

Raw int64 ids in, raw float32 out, so that no JSON is measured. With more than one row a batch `forward` cuts what it
got into runs of like lengths by cost (a call counts as 12 tokens): what a careful user of mosec would write, and five
times what padding to the longest gives (docs/design/numbers.md, "Batching servers"). Imports nothing of Tidegate.
"""

# mypy: ignore-errors
import os

import numpy as np
import onnxruntime
from mosec import Server, Worker

MODEL = os.environ["BENCH_MODEL"]
CORE, MAX_BATCH = int(os.environ["BENCH_CORE"]), int(os.environ["BENCH_MAX_BATCH"])
CALL_TOKENS = 12


def session():
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(MODEL, options, providers=["CPUExecutionProvider"])


def run(model, rows):
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    mask = np.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
        mask[number, : len(row)] = 1
    return model.run(None, {"input_ids": ids, "attention_mask": mask})[0]


def cheapest_runs(lengths):
    """Of ascending lengths: (start, end) of the runs that cost least together."""
    best, starts = [0.0], []
    for end in range(1, len(lengths) + 1):
        costs = [best[start] + CALL_TOKENS + (end - start) * lengths[end - 1] for start in range(end)]
        starts.append(min(range(end), key=costs.__getitem__))
        best.append(min(costs))
    runs, end = [], len(lengths)
    while end:
        runs.append((starts[end - 1], end))
        end = starts[end - 1]
    return runs


class Embed(Worker):
    def __init__(self):
        super().__init__()
        self.model = session()
        if CORE >= 0:
            os.sched_setaffinity(0, {CORE})
        run(self.model, [[101] * 64])

    def deserialize(self, data):
        return np.frombuffer(data, np.int64)

    def serialize(self, data):
        return data.tobytes()

    def forward(self, data):
        if MAX_BATCH == 1:
            return run(self.model, [data])[0]
        order = sorted(range(len(data)), key=lambda index: len(data[index]))
        answers = [None] * len(data)
        for start, end in cheapest_runs([len(data[index]) for index in order]):
            chosen = order[start:end]
            for index, answer in zip(chosen, run(self.model, [data[index] for index in chosen])):  # noqa: B905
                answers[index] = answer
        return answers


if __name__ == "__main__":
    server = Server()
    server.append_worker(Embed, num=1, max_batch_size=MAX_BATCH, max_wait_time=5)
    server.run()
