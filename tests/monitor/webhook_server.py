"""A small HTTP server for the tests: it keeps what is posted, and answers as configured."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class WebhookServer:
    """`status` is what it answers; `hangs` keeps it from answering while set."""

    def __init__(self, status=200, hangs=False):
        self.messages, self.released = [], threading.Event()
        self.authorizations = []
        if not hangs:
            self.released.set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.messages.append((self.path, self.headers["Content-Type"], json.loads(body)))
                outer.authorizations.append(self.headers["Authorization"])
                outer.released.wait(30)
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_GET(self):
                outer.messages.append((self.path, None, None))

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def texts(self, number, seconds=10.0):
        """The first texts, waited for."""
        end = time.monotonic() + seconds
        while len(self.messages) < number and time.monotonic() < end:
            time.sleep(0.01)
        return [body["text"] for _, _, body in self.messages]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
