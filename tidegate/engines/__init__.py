"""One module per model runtime behind the small interface `Engine`; `load_engine` chooses by the manifest.

Worker processes import `load_engine`. Only this room and `tidegate/tools/build` import a model runtime. Engines take
and return arrays: requests, queues and batches do not belong here.

ONNX Runtime since 1.29 tells its maker which models are loaded and how they run, unless the environment forbids it
before the library is loaded: names and digests of models are nobody's business. So it is forbidden here, ahead of every
engine, for this process and its children.
"""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
