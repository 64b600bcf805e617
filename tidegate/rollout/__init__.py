"""The parts of a model rollout that gateway and device share: signed desired documents, plans and golden cases.

    plan.py       one model's plan: its files with chunk digests, and the rules by which a device takes it in
    device_settings.py   the keys of a device's configuration that may be changed from outside, with their bounds
    desired.py    the document of one device or one group, and how a device's own overrides its groups'
    signing.py !  Ed25519 signatures over the canonical bytes; keys and their rotation
    golden.py     the cases of the golden probe, and whether answers are near enough to theirs
    golden_prompts.py   the same of models that generate: prompts with greedy answers

The gateway writes these documents and the edge agent reads them; this room only defines and checks them. The reports of
a device about a rollout are fleet messages (`tidegate/fleet/reported.py`).
"""
