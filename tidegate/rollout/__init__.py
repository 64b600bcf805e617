"""What both sides of a model rollout share: signed documents of what a device shall run, and how they are read.

    plan.py       one model's plan: its files with chunk digests, and the rules by which a device takes it in
    desired.py    the document of one device or one group, and how a device's own overrides its groups'
    signing.py !  Ed25519 signatures over the canonical bytes; keys and their rotation
    golden.py     the cases of the golden probe, and whether answers are near enough to theirs

The other direction, what a device reports, is a message of the fleet like others (`tidegate/fleet/reported.py`).
"""
