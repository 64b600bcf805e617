"""Room gateway/core/admission."""
