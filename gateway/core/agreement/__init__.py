"""Whether devices' answers still agree with the pool's: the sequential tests, what is watched, and what may be spent.

Pure. `gateway/serving/shadowing.py` asks for the second answers, and `gateway/core/fleet` holds who is demoted.
"""
