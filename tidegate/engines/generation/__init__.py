"""Engines that generate text: each implements `tidegate.generate.engine.GenerativeEngine`, in a worker process.

`load_generative_engine` in `tidegate/engines/engine.py` imports them by the name that a manifest gives.
"""
