"""Reads the credentials that a caller presents over gRPC."""

from __future__ import annotations

from collections.abc import Iterable
from ssl import PEM_cert_to_DER_cert
from typing import Any

import grpc

from tidegate.oip.guard import KEY_HEADER, PresentedCredentials, shown_as_one

Context = grpc.aio.ServicerContext[Any, Any]


def credentials_over_grpc(metadata: Iterable[tuple[str, str]], context: Context, protocol: str) -> PresentedCredentials:
    said = list(metadata)
    return PresentedCredentials(
        shown_as_one([value for key, value in said if key == "authorization"]),
        shown_as_one([value for key, value in said if key == KEY_HEADER]),
        lambda: _certificate(context),
        protocol,
        context.peer() or "",
    )


def _certificate(context: Context) -> bytes | None:
    """The peer certificate. gRPC requests certificates only to verify them, so one that is present was verified."""
    found = context.auth_context().get("x509_pem_cert")
    return PEM_cert_to_DER_cert(next(iter(found)).decode("ascii")) if found else None
