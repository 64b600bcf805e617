"""vLLM as the engine of generating variants: its own server, as a supervised child of the pool, spoken to in tokens.

A `VllmProcess` stands where a worker process stands (`cloud_pool/workers/device_worker.py`), so queue, slots, caches,
deadlines, watchdog and restarts are those of every generating worker. The server is started by `server_process.py`
from `command_line.py` and held by `warden.py`, asked by `http_client.py` in the words of `wire.py`; each answer is
checked by `answer.py`, and `server_sequences.py` makes of it what a worker process would tell.
"""
