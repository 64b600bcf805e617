"""Serve as an operator sees it: through the REST interface of Ray's dashboard on the head."""

from __future__ import annotations

import json
import urllib.request
from typing import Any, Final

DASHBOARD: Final = 18265


class ServeRest:
    """Blocks. Raises OSError or ValueError while there is no head that answers."""

    def ask(self, path: str, body: Any = None, method: str = "GET") -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{DASHBOARD}{path}", data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            raw = answer.read()
        return json.loads(raw) if raw else None

    def deploy(self, **args: Any) -> None:
        """Bring the application, or update it."""
        application = {
            "name": "pool",
            "import_path": "cloud_pool.ray_serve:app",
            "external_scaler_enabled": True,
            "args": args,
        }
        self.ask("/api/serve/applications/", {"proxy_location": "Disabled", "applications": [application]}, "PUT")

    def replicas(self) -> dict[str, tuple[int, str]]:
        """By Serve's own id: pid, 0 of one that is not placed yet, and state."""
        found = self.ask("/api/serve/applications/")["applications"]
        deployments = found.get("pool", {}).get("deployments", {})
        listed = deployments.get("pool", {}).get("replicas", [])
        return {one["replica_id"]: (one.get("pid") or 0, one["state"]) for one in listed}

    def status(self) -> str:
        """Of the application, with its message."""
        one = self.ask("/api/serve/applications/")["applications"].get("pool", {})
        return f"{one.get('status')}: {one.get('message')}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} :{DASHBOARD}>"
