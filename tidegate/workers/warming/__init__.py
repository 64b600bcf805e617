"""What a worker knows of its models before the first call: a user's samples that were run, and costs of an earlier run.

Warm-up by made-up inputs, which measures, is `tidegate/workers/warmup.py`.
"""
