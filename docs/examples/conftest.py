"""The server that the example's client asks; your tests would start your own."""

import socketserver
import threading

import pytest


class Bank(socketserver.StreamRequestHandler):
    def handle(self):
        if self.rfile.readline() == b"balance?\n":
            self.wfile.write(b"42\n")


class BankServer(socketserver.ThreadingTCPServer):
    daemon_threads = True  # not waited for at the end: behind a link that is still broken a connection has none


@pytest.fixture
def bank():
    with BankServer(("127.0.0.1", 0), Bank) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address
        server.shutdown()
