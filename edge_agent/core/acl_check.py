"""The ACL check tests at each start whether the broker keeps devices apart.

A denied SUBSCRIBE is silent, and so is a PUBLISH in MQTT 3.1.1, so a device under a wrong user name would report into
the void, and a broker without an ACL lets any device speak as any other; neither is seen until it is too late. So the
agent publishes twice when its session begins, to topics without readers: below its own name, which must be allowed,
and below a name that no device can have, which must not be. MQTT 5 answers each with a reason.

Pure: the topics to try, and the meaning of the answers. Each finding is reported once, and again when it changes.
Source: docs/design/edge-state.md, "Access control check".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from tidegate.fleet.topics import Topics

Severity = Literal["info", "warning", "error"]
_STRANGER: Final = "__acl_probe__"  # names begin with a letter or digit


@dataclass(frozen=True, slots=True)
class AclFinding:
    severity: Severity
    words: str


class AclCheck:
    """Mutable: the last findings, and the topics whose answers are outstanding."""

    def __init__(self, topics: Topics, device: str) -> None:
        self._device = device
        self._fleet = topics.fleet
        self._own = topics.probe(device)
        self._strangers = topics.probe(_STRANGER)
        self._told: dict[str, AclFinding] = {}

    def topics(self, protocol: str) -> tuple[str, ...]:
        """The topics to try in a session of this protocol."""
        return (self._own, self._strangers) if protocol == "5" else ()

    def cannot_tell(self) -> AclFinding | None:
        words = "this broker speaks MQTT 3.1.1, which cannot tell whether it keeps devices apart"
        return self._news("", AclFinding("info", words))

    def answered(self, topic: str, refusal: str) -> AclFinding | None:
        """The finding of an answer, if it is news. `refusal` is the broker's reason, "" for none."""
        if topic == self._own:
            return self._news(topic, self._of_own(refusal))
        if topic == self._strangers:
            return self._news(topic, self._of_strangers(refusal))
        return None

    def _of_own(self, refusal: str) -> AclFinding:
        if not refusal:
            return AclFinding("info", f"the broker lets this device speak as {self._device}")
        return AclFinding(
            "error",
            f"the broker does not let this device speak as {self._device} in the fleet {self._fleet} ({refusal}), so "
            "no gateway hears of it: `fleet` must be the one that `tidegate broker config --fleet` was given, and its "
            "user name there, or its certificate's common name, the device's name",
        )

    def _of_strangers(self, refusal: str) -> AclFinding:
        if refusal:
            return AclFinding("info", "the broker lets this device speak as nobody else")
        return AclFinding(
            "warning",
            "the broker lets this device speak as any other: it has no ACL, or a wrong one; "
            "`tidegate broker config --for mosquitto` writes one",
        )

    def _news(self, about: str, finding: AclFinding) -> AclFinding | None:
        if self._told.get(about) == finding:
            return None
        self._told[about] = finding
        return finding

    def __repr__(self) -> str:
        worst = [one.words for one in self._told.values() if one.severity != "info"]
        return f"<AclCheck {self._device} {worst[0] if worst else 'no complaint'}>"
