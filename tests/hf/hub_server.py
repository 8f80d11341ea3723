"""A hub of one repository on this machine, enough of its protocol for the real client to list and download files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def hub(repo: str, folder: Path, mood: str = "well") -> Iterator[tuple[str, list[str]]]:
    """Serve ``folder`` as ``repo``; yields the endpoint and the list of paths asked for.

    ``mood``: ``well``; ``gated`` (describes the repository, refuses its files); ``mute`` (accepts connections and
    never answers).
    """
    asked: list[str] = []
    quiet_down = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            asked.append(path)
            if mood == "mute":
                quiet_down.wait(60)
                return
            if path.startswith(f"/api/models/{repo}"):
                self.describe(path, body)
            elif path.startswith(f"/{repo}/resolve/{COMMIT}/"):
                self.send(path.removeprefix(f"/{repo}/resolve/{COMMIT}/"), body)
            else:
                self.reply(404, b"", {"X-Error-Code": "RepoNotFound"}, body)

        def describe(self, path: str, body: bool) -> None:
            files = sorted(file for file in folder.iterdir() if file.is_file())
            answer: Any
            if "/tree/" in path:
                answer = [
                    {"type": "file", "oid": digest(file), "size": file.stat().st_size, "path": file.name}
                    for file in files
                ]
            else:
                siblings = [{"rfilename": file.name} for file in files]
                answer = {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "siblings": siblings}
            self.reply(200, json.dumps(answer).encode(), {"Content-Type": "application/json"}, body)

        def send(self, name: str, body: bool) -> None:
            if mood == "gated":
                self.reply(403, b"gated", {"X-Error-Code": "GatedRepo"}, body)
                return
            file = folder / name
            if not file.is_file():
                self.reply(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
                return
            self.reply(200, file.read_bytes(), {"ETag": f'"{digest(file)}"', "X-Repo-Commit": COMMIT}, body)

        def reply(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            """Nothing: the test looks at ``asked``."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        quiet_down.set()
        server.shutdown()
        server.server_close()
        thread.join()


def digest(file: Path) -> str:
    """What identifies a file's content on the hub."""
    return hashlib.sha1(file.read_bytes(), usedforsecurity=False).hexdigest()
