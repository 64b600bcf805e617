"""A user's own test, whole: does my client survive a network that breaks? (Run by Tidegate's own tests.)"""

import socket


def fetch(address: str, timeout_s: float) -> bytes:
    """The client under test: asks once, and once more over a new connection if there is no answer in time."""
    host, port = address.split(":")
    for _ in range(2):
        try:
            with socket.create_connection((host, int(port)), timeout_s) as server:
                server.sendall(b"balance?\n")
                return server.recv(100)
        except OSError:
            continue
    return b"no answer"


def test_an_answer_comes_over_lte(link, bank):
    lte = link(bank, "lte_driving", seed=7)
    assert fetch(lte.address, timeout_s=15.0) == b"42\n"


def test_a_broken_moment_costs_one_retry(link, netsim, bank):
    slow = link(bank, delay_ms=5)
    slow.partition("blackhole")
    netsim.at(0.2, slow.heal)
    assert fetch(slow.address, timeout_s=0.5) == b"42\n"


def test_a_connection_that_is_reset_is_told_from_one_that_is_silent(link, bank):
    broken = link(bank)
    broken.partition("reset")
    assert fetch(broken.address, timeout_s=0.5) == b"no answer"
    assert [event["why"] for event in broken.events("refused")] == ["reset", "reset"]
