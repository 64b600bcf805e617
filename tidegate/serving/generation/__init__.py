"""How a target serves a generating model: who may begin, how a request becomes a generation, and what it cost.

An edge and a pool use the same: `sequence_queue.py` decides which generation begins next, `sequence_scheduler.py` holds
those that wait, and `generating_variant.py` turns a call into tokens, an answer and what is learned from it. Workers,
and how they are kept alive, belong to each process; engines step sequences in `tidegate/workers/generation`.
"""
