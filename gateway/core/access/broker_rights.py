"""Broker rights say whether the broker lets this gateway speak in its fleet.

A broker that refuses a gateway's messages takes its connection all the same, and its subscriptions without a word. So a
gateway whose `fleet` is not the one of the broker's access list looks healthy and hears of no device. Its presence
(`gw/NAME/state`) is the first thing that it says in each session, and MQTT 5 answers a refused one with the reason.
MQTT 3.1.1 takes what it throws away, and so tells nothing.

Pure: answers in, words out. Each finding is reported once, and again when it changes.
"""

from __future__ import annotations


class BrokerRights:
    """Mutable: what the broker answered last. `refusal` is in words for operators, "" where it refuses nothing."""

    def __init__(self, fleet: str, gateway: str) -> None:
        self._fleet = fleet
        self._gateway = gateway
        self.refusal = ""

    def answered(self, reason: str) -> str | None:
        """The new finding, "" when the gateway may speak again; None if nothing has changed.

        Args:
            reason: the broker's, for refusing the gateway's presence; "" for having taken it.
        """
        words = self._words(reason) if reason else ""
        if words == self.refusal:
            return None
        self.refusal = words
        return words

    def _words(self, reason: str) -> str:
        return (
            f"the broker does not let this gateway speak as {self._gateway} in the fleet {self._fleet} ({reason}), so "
            "no device is found over it: `fleet` must be the one that `tidegate broker config --fleet` was given, "
            "`name` one of its `--gateway`, and the user name there, or the certificate's common name, "
            f"gw~{self._gateway}"
        )

    def __repr__(self) -> str:
        return f"<BrokerRights {self._gateway} in {self._fleet}: {self.refusal or 'no refusal'}>"
