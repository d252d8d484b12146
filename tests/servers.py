"""Real HTTP servers on this machine for tests of what asks them."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]  # status, and a body: bytes as they are, anything else as JSON
Behaviour = Callable[[int, dict[str, Any]], Reply]


class Server:
    """One server; `requests` are (path, key, body) in the order in which they came."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.requests: list[tuple[str, str | None, dict[str, Any]]] = []
        self.busiest = self._busy = 0
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server._lock:
                    server.requests.append((self.path, self.headers.get("Authorization"), body))
                    number = len(server.requests)
                    server._busy += 1
                    server.busiest = max(server.busiest, server._busy)
                status, said = behaviour(number, body)
                with server._lock:
                    server._busy -= 1
                content = said if isinstance(said, bytes) else json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                if status == 429:
                    self.send_header("Retry-After", "7")
                if status == 302:
                    self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._http.server_address[1]}/v1"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@contextmanager
def serving(*behaviours: Behaviour) -> Iterator[list[Server]]:
    servers = [Server(behaviour) for behaviour in behaviours]
    try:
        yield servers
    finally:
        for server in servers:
            server.close()


def completion(text: str, finish: str = "stop", prompt_tokens: int | None = None) -> Reply:
    usage = {"completion_tokens": 3} | ({} if prompt_tokens is None else {"prompt_tokens": prompt_tokens})
    return 200, {"choices": [{"text": text, "finish_reason": finish}], "usage": usage}


def always(reply: Reply) -> Behaviour:
    return lambda number, body: reply
