"""Metrics of a server in Prometheus' text format: requests by endpoint and status, and of every model its tokens, slots and version."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from assay.serving.engine_thread import EngineThread

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
KNOWN_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/adapters", "/v1/trajectories", "/v1/train", "/v1/weights",
               "/health", "/metrics")


class RequestCounts:
    """Middleware that counts replies by path and status; paths that there are not count as one, so that no client can make up series."""

    def __init__(self, app: Any, counts: Counter[tuple[str, int]]):
        self.app, self.counts = app, counts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def counted(message: Any) -> None:
            if message["type"] == "http.response.start":
                path = next((known for known in KNOWN_PATHS if scope["path"] == known or scope["path"].startswith(f"{known}/")), "other")
                self.counts[path, message["status"]] += 1
            await send(message)

        await self.app(scope, receive, counted if scope["type"] == "http" else send)


def metrics_text(serving: EngineThread, requests: Counter[tuple[str, int]]) -> str:
    models = list(serving.models.values())

    def by_model(value: Any) -> list[tuple[dict[str, str], float]]:
        return [({"model": model.name}, value(model)) for model in models]

    families: list[tuple[str, str, str, list[tuple[dict[str, str], float]]]] = [
        ("assay_requests_total", "counter", "Replies by endpoint and status.",
         [({"path": path, "status": str(status)}, count) for (path, status), count in sorted(requests.items())]),
        ("assay_prompt_tokens_total", "counter", "Prompt tokens of completions that ended.", by_model(lambda m: m.prompt_tokens)),
        ("assay_completion_tokens_total", "counter", "Tokens drawn in completions that ended.", by_model(lambda m: m.completion_tokens)),
        ("assay_forwarded_tokens_total", "counter", "Tokens that went through the model.", by_model(lambda m: m.engine.forwarded)),
        ("assay_reused_tokens_total", "counter", "Prompt tokens whose keys and values were there from an earlier turn.",
         by_model(lambda m: m.engine.reused)),
        ("assay_completions", "gauge", "Completions under way or waiting.", by_model(lambda m: m.members)),
        ("assay_slots", "gauge", "Completions that are made at a time.", by_model(lambda _: serving.size.slots)),
        ("assay_model_broken", "gauge", "1 where a model serves no more.", by_model(lambda m: float(m.broken is not None))),
        ("assay_model_info", "gauge", "The version of the weights that a name stands for.",
         [({"model": model.name, "version": model.engine.version}, 1) for model in models])]
    return "".join(line for family in families for line in _written(*family))


def _written(name: str, kind: str, told: str, samples: Iterable[tuple[dict[str, str], float]]) -> Iterable[str]:
    yield f"# HELP {name} {told}\n# TYPE {name} {kind}\n"
    for labels, value in samples:
        shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"{name}{{{shown}}} {value:g}\n" if not float(value).is_integer() else f"{name}{{{shown}}} {int(value)}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
