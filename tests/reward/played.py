"""A judge on loopback that does what a test tells it to, over real HTTP."""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Asked = dict[str, Any]
Reaction = Callable[[int, Asked], tuple[int, dict[str, str], str]]  # (how often this group was asked about, the request) -> reply


class Played(ThreadingHTTPServer):
    """A judge on loopback that does what `reaction` says, and keeps what it was asked."""

    daemon_threads = True
    reaction: Reaction

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.forget()

    def forget(self) -> None:
        self.asked: list[Asked] = []
        self.keys: list[str | None] = []
        self.times: Counter[str] = Counter()
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.leave = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Played

    def do_POST(self) -> None:
        played = self.server
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with played.lock:
            played.asked.append(asked)
            played.keys.append(self.headers.get("Authorization"))
            about = asked["messages"][1]["content"].split("The completions:")[0]
            number, played.times[about] = played.times[about], played.times[about] + 1
            played.at_once += 1
            played.most_at_once = max(played.most_at_once, played.at_once)
        status, headers, body = played.reaction(number, asked)
        with played.lock:
            played.at_once -= 1
        try:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body.encode())), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body.encode())
        except (BrokenPipeError, ConnectionResetError):  # who asked has left
            pass

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def playing() -> Iterator[Played]:
    with Played() as played:
        thread = threading.Thread(target=played.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield played
        finally:
            played.leave.set()
            played.shutdown()
            thread.join()


def shown(asked: Asked) -> list[dict[str, Any]]:
    return json.loads(asked["messages"][1]["content"].split("The completions:\n")[1])


def message(content: Any, reason: str = "stop", usage: bool = True) -> tuple[int, dict[str, str], str]:
    body = {"choices": [{"message": {"role": "assistant", "content": content}, "finish_reason": reason}]}
    return 200, {}, json.dumps(body | ({"usage": {"prompt_tokens": 100, "completion_tokens": 10}} if usage else {}))


def always(status: int, body: str = "no", **headers: str) -> Reaction:
    return lambda number, asked: (status, {name.replace("_", "-"): value for name, value in headers.items()}, body)
