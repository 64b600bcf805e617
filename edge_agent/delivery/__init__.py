"""Models come to this device: signed documents in, verified files on disk, a new generation that earns its place.

deployer.py   takes documents in and drives `edge_agent/core/rollout_machine.py`, one rollout at a time
documents.py  the accepted documents and the trusted keys, on disk
journal.py    what the rollouts are at, on disk before it is acted upon
model_store.py      artefacts by digest, versions as links to them, generations and the one that is committed
partial_file.py    a file that is coming in, checked chunk by chunk
fetching.py   HTTP ranges within a budget
verifying.py  whether what came is the model that the plan says, and can be loaded by anything at all
golden_probe.py    golden cases, side by side with the generation that runs
preconditions.py  why not now: metered, window, disk, heat, memory
"""
