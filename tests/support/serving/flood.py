"""A publisher that floods a broker with messages of a fleet: what devices say, said again and again, and nonsense.

A process of its own: `python -m tests.support.serving.flood PORT RATE SECONDS PAYLOADS` with the messages as JSON lines
of [topic, payload] in the file PAYLOADS. Writes MQTT 3.1.1 frames of QoS 0 to one connection, a hundredth of a second's
worth at a time; prints how many were sent.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time
from itertools import cycle, islice
from pathlib import Path

_TURNS_A_SECOND = 100


def flood(port: int, rate: float, seconds: float, messages: list[tuple[str, bytes]]) -> int:
    frames = cycle([_publish(topic, payload) for topic, payload in messages])
    sent = 0
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"\x10\x11\x00\x04MQTT\x04\x02\x00\x00\x00\x05flood")
        connection.recv(4)
        began_at = time.perf_counter()
        while (elapsed_s := time.perf_counter() - began_at) < seconds:
            due = int(elapsed_s * rate) - sent
            connection.sendall(b"".join(islice(frames, due)))
            sent += due
            time.sleep(1.0 / _TURNS_A_SECOND)
        connection.sendall(b"\xe0\x00")
    return sent


def _publish(topic: str, payload: bytes) -> bytes:
    words = struct.pack("!H", len(topic.encode())) + topic.encode() + payload
    length, left = b"", len(words)
    while True:
        left, seven = divmod(left, 128)
        length += bytes((seven | (128 if left else 0),))
        if not left:
            return b"\x30" + length + words


if __name__ == "__main__":
    lines = [json.loads(line) for line in Path(sys.argv[4]).read_text().splitlines()]
    print(flood(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), [(one[0], one[1].encode()) for one in lines]))
