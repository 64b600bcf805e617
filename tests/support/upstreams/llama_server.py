"""A real llama-server as a process: `python llama_server.py GGUF PORT [KEY]`, in an environment that has xllamacpp.

One thread: llama.cpp's threads wait for each other by spinning, and on cores that others use two are far slower.
It says `ready` on its output, and ends with its input.
"""

from __future__ import annotations

import sys


def main(gguf: str, port: str, key: str = "") -> None:
    import xllamacpp  # type: ignore[import-not-found, unused-ignore]

    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.n_ctx, params.n_parallel = 4096, 4
    params.hostnames, params.port = ["127.0.0.1"], int(port)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    if key:
        params.api_keys = [key]
    server = xllamacpp.Server(params)
    print("ready", server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
