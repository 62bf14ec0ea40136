"""A server that plays the part of the Hugging Face hub that downloads need: listings and files, and refusals."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"
Answer = tuple[int, dict[str, str]]


@dataclass
class FakeHub:
    """``repositories``: files by name of the repository, ``datasets/NAME`` for a dataset.

    ``scripted``: answers that are given first, in turn, to requests whose path holds the key. ``gated``: repositories
    that only the tokens of ``members`` may read; ``tokens``: all that are valid.
    """

    repositories: dict[str, dict[str, bytes]]
    scripted: dict[str, list[Answer]] = field(default_factory=dict)
    gated: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    requests: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""

    def answer(self, method: str, path: str, token: str | None) -> tuple[int, dict[str, str], bytes]:
        self.requests.append((method, path))
        for part, answers in self.scripted.items():
            if part in path and answers:
                return *answers.pop(0), b""
        if token is not None and token not in self.tokens:
            return 401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b""
        is_check = path.endswith("/auth-check")
        path = path.removesuffix("/auth-check")
        is_listing = path.startswith("/api/")
        name = path.removeprefix("/api/").removeprefix("models/") if is_listing else path[1:].partition("/resolve/")[0]
        name, is_tree, _ = name.partition("/tree/")
        name, _, _ = name.partition("/revision/")
        if name not in self.repositories:
            return 401 if token is None else 404, {"X-Error-Code": "RepoNotFound"}, b""
        if is_listing and not is_check:
            return 200, {"Content-Type": "application/json"}, self._tree(name) if is_tree else self._listing(name)
        if name in self.gated and token not in self.members:
            return 401 if token is None else 403, {"X-Error-Code": "GatedRepo"}, b""
        if is_check:
            return 200, {}, b""
        _, _, file = path.partition("/resolve/")[2].partition("/")
        if file not in self.repositories[name]:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        content = self.repositories[name][file]
        etag = hashlib.sha256(content).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}, content

    def _tree(self, name: str) -> bytes:
        files = self.repositories[name].items()
        return json.dumps(
            [{"type": "file", "path": file, "size": len(data), "oid": file} for file, data in files]
        ).encode()

    def _listing(self, name: str) -> bytes:
        files = self.repositories[name]
        siblings = [{"rfilename": file, "size": len(content), "blobId": file} for file, content in files.items()]
        common: dict[str, Any] = {"id": name.removeprefix("datasets/"), "sha": SHA, "siblings": siblings}
        return json.dumps({**common, "private": False, "tags": [], "downloads": 0}).encode()


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    """Sets ``hub.url``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.reply("HEAD")

        def do_GET(self) -> None:
            self.reply("GET")

        def reply(self, method: str) -> None:
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            status, headers, content = hub.answer(method, unquote(urlsplit(self.path).path), token)
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if method == "GET":
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
