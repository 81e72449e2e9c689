"""A real web server that takes what is sent to it, and behaves as badly as it is ordered to."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple


class Request(NamedTuple):
    method: str
    path: str
    headers: dict
    body: object


class Receiver:
    """Listens on 127.0.0.1 while it is entered.

    Attributes:
        got: all requests, in order.
        manners: what is done at a path: a status, "hang", "drip", "garbage", "endless" or a Location to redirect to;
            without any it answers 200.
        release: set to end all that hangs.
    """

    def __init__(self):
        self.got, self.manners, self.release = [], {}, threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                parsed = json.loads(body) if body else None
                receiver.got.append(Request(self.command, self.path, dict(self.headers), parsed))
                try:
                    receiver.answer(self, receiver.manners.get(self.path, 200))
                except OSError:
                    self.close_connection = True  # the other side has enough

            do_GET = do_POST  # noqa: N815 as its base wants it

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, handler, manner):
        if manner == "hang":
            self.release.wait(60)
            handler.close_connection = True
            return
        if manner in {"drip", "garbage", "endless"}:
            handler.close_connection = True
            if manner == "garbage":
                handler.wfile.write(b"\x16\x03\x01\x00 how do you do\r\n\r\n" * 100)
                return
            handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"\r\n" * (manner == "endless"))
            while not self.release.wait(0 if manner == "endless" else 0.05):
                handler.wfile.write(b"x" * (65536 if manner == "endless" else 1))
            return
        handler.send_response(302 if isinstance(manner, str) else manner)
        if isinstance(manner, str):
            handler.send_header("Location", manner)
        if manner == 429:
            handler.send_header("Retry-After", "1")
        said = b"thanks" if manner == 200 else b"no, and the secret is /s3cret"
        handler.send_header("Content-Length", str(len(said)))
        handler.end_headers()
        handler.wfile.write(said)

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.release.set()
        self._server.shutdown()
        self._server.server_close()

    def at(self, path):
        """Return what came to a path."""
        return [each for each in self.got if each.path == path]
