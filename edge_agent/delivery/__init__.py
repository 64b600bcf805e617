"""How models come to this device: signed documents, verified files on disk, and generations that must prove themselves.

    deployer.py       takes documents in and drives `edge_agent/core/rollout_machine.py`, one rollout at a time
    deployment.py     the models of the device put together: what starts, what answers, what changes
    boot.py           what may be served at a start
    documents.py      the accepted documents and the trusted keys, on disk
    journal.py        the state of each rollout, on disk before it is acted upon
    steps.py          the work of each state of a rollout
    model_store.py    artefacts by digest, versions as links to them, generations and the committed one
    partial_file.py   a file under download, checked chunk by chunk
    fetching.py       HTTP ranges within a budget
    receiving.py      reads a connection ahead of the disk
    verifying.py      whether the fetched files are the planned model, and can be loaded
    golden_probe.py   golden cases of a model with single answers
    golden_prompts_probe.py   golden prompts of a model that generates
    probe_times.py    times of both, side by side with the running generation
    preconditions.py  why a rollout waits: metered link, window, disk, heat, memory
    failures.py       how a step ends without success

The app imports `Deployment`. Decisions without IO belong in `edge_agent/core`, and running a model's worker belongs in
`edge_agent/serving`.
"""
