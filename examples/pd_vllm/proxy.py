"""A proxy for disaggregated prefill: each completion is prefilled by one server and decoded by another.

    python examples/pd_vllm/proxy.py --port 8000 --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

The prefill server saves the prompt's cache before it answers, so the decode server finds it in the store.
"""

from __future__ import annotations

import argparse
import http.client
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

PATHS = ("/v1/completions", "/v1/chat/completions")


def send(server: str, path: str, body: dict[str, Any], timeout: float = 600.0) -> http.client.HTTPResponse:
    """POST a JSON body; the response is open for reading."""
    connection = http.client.HTTPConnection(urlsplit(server).netloc, timeout=timeout)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


def prefill(server: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    """Let a server compute the prompt, and one token, as it must; its status and answer."""
    only = {**body, "max_tokens": 1, "stream": False}
    for name in ("stream_options", "max_completion_tokens"):
        only.pop(name, None)
    with send(server, path, only) as response:
        return response.status, response.read()


def serve(port: int, prefill_server: str, decode_server: str) -> ThreadingHTTPServer:
    """A server at ``port`` (0: any free one) that has not begun to serve."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if self.path not in PATHS:
                self.send_error(404)
                return
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = prefill(prefill_server, self.path, body)
            if status != 200:
                self._begin(status, "application/json")
                self.wfile.write(answer)
                return
            with send(decode_server, self.path, body) as response:
                self._begin(response.status, response.getheader("Content-Type") or "application/json")
                while piece := response.read1(65_536):
                    self.wfile.write(piece)
                    self.wfile.flush()

        def _begin(self, status: int, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Connection", "close")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Quiet."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", required=True, metavar="URL")
    parser.add_argument("--decode", required=True, metavar="URL")
    given = parser.parse_args()
    serve(given.port, given.prefill, given.decode).serve_forever()


if __name__ == "__main__":
    main()
