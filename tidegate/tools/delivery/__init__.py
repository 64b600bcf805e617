"""The operator's side of model delivery: `tidegate model push`, `rollout`, `status`, `split` and their kin.

Orders are made and signed here, since the operator's key never leaves the operator's machine. The gateway's side lives
in `gateway/delivery`, the device's in `edge_agent/delivery`; only the command line imports this room.
"""
