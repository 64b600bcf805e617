"""Both clients' view of their server: its address, the credential, the defaults, and what HTTP's failures mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import random
from typing import Any, Final

import httpx2

from tidegate import clock
from tidegate.client.budget import CallBudget
from tidegate.client.exchange import Exchange
from tidegate.client.options import CallOptions, option_headers
from tidegate.client.refusals import NoConnection, error_from_http, may_have_been_done
from tidegate.client.retry_policy import RetryPolicy
from tidegate.oip.request_constraints import DEFER_KEY
from tidegate.outcome import BadAnswer, DeadlineExceeded, Disconnected, ServeError

MAX_ANSWER_BYTES: Final = 512 << 20
CONNECTS_WITHIN_S: Final = 5.0


@dataclass(frozen=True)
class ClientSettings:
    """The settings of a client. `url` is the gateway's HTTP address, without a path."""

    url: str
    api_key: str | None = None
    budget_s: float | None = None
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    draw: Callable[[], float] = field(default=random, repr=False)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url has to begin with http:// or https://, not {self.url!r}")
        CallBudget.of(self.budget_s, 0.0)

    def http_settings(self, verify: Any) -> dict[str, Any]:
        """What an HTTP client is made with. A gateway is called as it is named: no proxy of the environment."""
        headers = {"user-agent": "python-tidegate"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        settings = {"base_url": self.url.rstrip("/"), "headers": headers, "trust_env": False}
        return settings | ({} if verify is None else {"verify": verify})

    def call(self, exchange: Exchange[Any], options: CallOptions) -> OpenCall:
        """A call that begins now."""
        budget = CallBudget.of(options.get("budget_s", self.budget_s), clock.now())
        return OpenCall(exchange, {**exchange.headers, **option_headers(options)}, budget, self)


@dataclass
class OpenCall:
    """One call over all of its tries."""

    exchange: Exchange[Any]
    headers: Mapping[str, str]
    budget: CallBudget
    settings: ClientSettings
    failed: int = 0

    def request(self, http: httpx2.Client | httpx2.AsyncClient) -> httpx2.Request:
        """The next try, with what is left of the budget. Raises DeadlineExceeded where nothing is."""
        now = clock.now()
        patience_s = self.budget.patience_s(now)
        return http.build_request(
            "POST",
            self.exchange.path,
            content=self.exchange.body,
            headers={**self.headers, **self.budget.headers(now)},
            timeout=httpx2.Timeout(patience_s, connect=min(patience_s, CONNECTS_WITHIN_S)),
        )

    def check(self, received_bytes: int) -> None:
        """Called as an answer comes. Raises where it is too long or too late by far."""
        if received_bytes > MAX_ANSWER_BYTES:
            raise BadAnswer(f"the server's answer is longer than {MAX_ANSWER_BYTES} bytes")
        if self.budget.is_over(clock.now()):
            raise DeadlineExceeded("the answer did not end within its budget")

    def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> Any:
        """The answer of a response. Raises the refusal that it is instead."""
        if status != 200:
            raise error_from_http(status, headers, body)
        return self.exchange.read(headers, body)

    def wait_s(self, error: ServeError) -> float:
        """Seconds until the next try. Raises the error where there is none."""
        self.failed += 1
        is_spent = may_have_been_done(error) and not (self.exchange.repeatable and DEFER_KEY not in self.headers)
        left_s = self.budget.left_s(clock.now())
        wait_s = self.settings.retry.wait_s(error, self.failed, left_s, self.settings.draw())
        if wait_s is None or is_spent:
            raise error
        return wait_s


def named(error: httpx2.HTTPError, url: str) -> ServeError:
    """An HTTP library's failure as one of ours."""
    if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
        return NoConnection(f"no connection to {url}: {error or type(error).__name__}")
    if isinstance(error, httpx2.TimeoutException):
        return DeadlineExceeded(f"{url} said nothing within the budget")
    return Disconnected(f"the connection to {url} broke: {error or type(error).__name__}")
