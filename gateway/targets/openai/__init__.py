"""Servers of other makers that speak OpenAI's interface: vLLM, SGLang, llama-server, Ollama, and services.

Others import `OpenAITarget`. A server is probed when it is found (`probing.py`) for what it can be asked: token ids in
and out by a dialect of its own (`vllm.py`, `sglang.py`, `llama_server.py`), or OpenAI's text (`text_dialect.py`).
Dialects say how a request is put and what an event means, and do no IO; `upstream_client.py` does it, with a bound on
everything that comes.
"""
