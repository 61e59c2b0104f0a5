"""Hub double: an HTTP server on loopback that answers huggingface_hub's own requests for one commit of small files.

Shown with it: our use of the real client, and what it sends and fetches. Not shown: the real hub, its tokens, LFS and Xet uploads.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c0ffee" + "0" * 34


class Hub(ThreadingHTTPServer):
    """`repositories` are {id: {name: bytes}}, datasets under datasets/ID. From one whose id ends with "spoiled" weights come back with a
    byte changed."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def running_hub() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Requests(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}"
            self.server.repositories.setdefault(name, {".gitattributes": b"*.safetensors filter=lfs\n"})
            self.server.private[name] = wanted.get("private", wanted.get("visibility") == "private")
            self._answer({"url": f"{self.server.endpoint}/{name}"})
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self._answer({"files": [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in files]})
        elif found := re.match(r"/api/models/(.+)/commit/main", self.path):
            lines = [json.loads(line) for line in body.splitlines()]
            added = {one["value"]["path"]: base64.b64decode(one["value"]["content"]) for one in lines if one["key"] == "file"}
            self.server.repositories[found[1]] |= added
            self._answer({"commitOid": COMMIT, "commitUrl": f"{self.server.endpoint}/{found[1]}/commit/{COMMIT}", "hookOutput": ""})
        else:
            self._answer({"error": self.path}, 400)

    def do_GET(self) -> None:
        found = re.match(r"/(?:api/)?(?:models/)?((?:datasets/)?[^/]+/[^/?]+)(?:/(tree|revision|resolve)/[^/?]+)?(?:/([^?]+))?", self.path)
        files = self.server.repositories.get(found[1]) if found else None
        if files is None:
            self._answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        elif found[2] == "tree":
            self._answer([{"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                          for name, data in files.items()])
        elif found[2] == "resolve":
            data = files[found[3]]
            if found[1].endswith("spoiled") and found[3].endswith(".safetensors"):
                data = data[:-1] + bytes([data[-1] ^ 1])
            self._answer(data, 200, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT})
        else:
            self._answer({"id": found[1], "sha": COMMIT, "tags": [], "siblings": [{"rfilename": name} for name in files]})

    do_HEAD = do_GET

    def _answer(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data)), "Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass
