"""The errors with which an MQTT session cannot begin; the wait before the next try depends on the error."""

from __future__ import annotations


class MqttError(Exception):
    """A session could not begin; the message says at which step."""


class BrokerRefused(MqttError):
    """The broker is there and does not want us: the password, a subscription, our name."""


class BrokerHungUp(MqttError):
    """The broker ended the connection instead of answering the CONNECT, as one does that does not know the version."""


class VersionRefused(BrokerRefused):
    """The broker does not speak this version of MQTT."""
