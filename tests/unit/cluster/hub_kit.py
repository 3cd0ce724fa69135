"""A hub on loopback: repositories of files in memory, over the part of the Hugging Face protocol that a download uses.

Keeps a list of what it was asked, and can refuse files, want a token, or break connections. Knows nothing of Bifolio.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".gguf", ".bin", ".pth")  # kept outside git, and served from another host


class Refusal(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.headers = status, {"X-Error-Code": code, "X-Error-Message": message}


@dataclass
class Repository:
    revisions: dict[str, dict[str, bytes]]  # branch -> file -> content
    token: str | None = None
    gated: bool = False
    forbidden: set[str] = field(default_factory=set)

    def commit(self, revision: str) -> tuple[str, dict[str, bytes]]:
        for name, files in self.revisions.items():
            digest = hashlib.sha1()
            for each in sorted(files):
                digest.update(each.encode() + files[each])
            if revision in (name, digest.hexdigest()):
                return digest.hexdigest(), files
        raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")


class Hub(ThreadingHTTPServer):
    def __init__(self, repositories: Mapping[str, Repository]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = dict(repositories)
        self.asked: list[tuple[str, str, str]] = []  # method, path, range
        self.break_after: list[int] = []  # the next large transfers end after that many bytes
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.cdn = f"http://localhost:{self.server_address[1]}"

    def transfers(self) -> list[str]:
        """The names of the files whose bytes were asked for since the last call."""
        asked, self.asked = self.asked, []
        return [
            unquote(path).rsplit("/", 1)[-1] for method, path, _ in asked if method == "GET" and "/api/" not in path
        ]


@contextmanager
def running(repositories: Mapping[str, Repository]) -> Iterator[Hub]:
    with Hub(repositories) as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        self.server.asked.append((self.command, path, self.headers.get("Range", "")))
        try:
            parts = [unquote(part) for part in path.strip("/").split("/")]
            match parts:
                case ["api", "models", org, name]:
                    self._describe(f"{org}/{name}", "main")
                case ["api", "models", org, name, "revision", revision]:
                    self._describe(f"{org}/{name}", revision)
                case ["cdn", org, name, revision, *file]:
                    _, files = self.server.repositories[f"{org}/{name}"].commit(revision)  # the address is the right
                    self._send_bytes(files["/".join(file)], {}, True)
                case [org, name, "resolve", revision, *file]:
                    self._resolve(f"{org}/{name}", revision, "/".join(file))
                case _:
                    raise Refusal(404)
        except Refusal as refusal:
            self._send(refusal.status, refusal.headers, b"")

    def _repository(self, name: str) -> Repository:
        repository = self.server.repositories.get(name)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if repository is None or (repository.token and not token):
            raise Refusal(401, "RepoNotFound", "Repository not found")
        if repository.token not in (None, token):
            raise Refusal(401, "", "Invalid credentials in Authorization header")
        if repository.gated and "/api/" not in self.path:
            raise Refusal(403, "GatedRepo", "Access to this model is restricted")
        return repository

    def _describe(self, name: str, revision: str) -> None:
        commit, files = self._repository(name).commit(revision)
        siblings = [{"rfilename": file, "size": len(content)} for file, content in files.items()]
        body = {"id": name, "sha": commit, "siblings": siblings}
        self._send(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repository = self._repository(name)
        commit, files = repository.commit(revision)
        if file not in files:
            raise Refusal(404, "EntryNotFound", f"{file} does not exist")
        if file in repository.forbidden:
            raise Refusal(403, "", "not for you")
        if file.endswith(LARGE):
            headers = {
                "X-Repo-Commit": commit,
                "X-Linked-Etag": f'"{hashlib.sha256(files[file]).hexdigest()}"',
                "X-Linked-Size": str(len(files[file])),
                "Location": f"{self.server.cdn}/cdn/{name}/{commit}/{file}",
            }
            self._send(302, headers, b"")
        else:
            etag = f'"{hashlib.sha1(files[file]).hexdigest()}"'
            self._send_bytes(files[file], {"X-Repo-Commit": commit, "ETag": etag}, False)

    def _send_bytes(self, content: bytes, headers: dict[str, str], breakable: bool) -> None:
        given = self.headers.get("Range")
        start = int(given.removeprefix("bytes=").split("-")[0]) if given else 0
        if start:
            headers |= {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        most = None
        if breakable and self.command == "GET" and self.server.break_after:
            most = self.server.break_after.pop(0)
        self._send(206 if start else 200, headers, content[start:], most)

    def _send(self, status: int, headers: dict[str, str], body: bytes, most: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:most])
        self.close_connection = self.close_connection or most is not None
