"""Authentication: each kind of credential becomes one `Identity`, and the guard requires it of every caller.

The composition root imports the guard and the audit; the operators' and the artefact port import their access checks.
What an identity may do is decided in `gateway/core/access`; limits and quotas are decided in `gateway/core/admission`.
"""
