"""Generations in a worker process: many sequences at a time, whose tokens leave with every step.

Both ends of `tidegate/workers/process.py` and `child.py` import this room, and it imports neither. The parent's end
is `active_sequences.py`, which knows what is under way, with `silence.py` and `sequence_watchdog.py` for a worker that
hangs; the child's end is `sequence_loop.py`, which steps the engines, in the order of `token_deadlines.py`; each
sequence there is a `stepped_sequence.py`. What
travels is in `messages.py`. Which generation starts when is the caller's business, and so is who pays for one.
"""
