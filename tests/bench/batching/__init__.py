"""The pool as an inference server for requests with deadlines and uneven sizes, beside everyone we could install.

Real text in MiniLM's tokens, log-normal lengths (many short, few long), Poisson arrivals from a process of its own, and
latency from the scheduled instant. Everybody runs the same fp32 ONNX graph by ONNX Runtime with one thread, alone on
one core; front ends, the generator and this program share the other. In each repeat all meet the same seeded schedule,
one after another, and ratios are taken within a repeat.

    rates    the highest rate at which 99 of 100 of all requests are answered within 100 ms, and within 250 ms
    closed   1, 8 and 64 callers, one request each at a time
    split    nine short for each very long one: was a short one passed by a long one that could have waited?
    twice    load of twice the limit: answers in time, and how soon the others hear no
    growth   a second worker, where there is a core for it

Ours: `tidegate pool` with each of its policies. References without a server: `alone.py`. Peers: mosec (a row a call; 8
rows cut by length) and Triton (`peers/`), from `make peers`; what is not installed is said to be skipped.
What the model's other variants do (packed, bf16) is measured beside it, where the demo model has them.

    python -m tests.bench.batching [--quick] [--repeats 3] [--seconds 5] [--minutes 17] [--no-peers]
"""
