"""OpenAI's API schema: requests that schemathesis makes from it, put to `assay serve`: answered by the schema, or refused in words.

Every made request is put twice: as it is (strange fields and all), and with the fields alone that are about sampling, which are most
often answered. A refusal is a status of 400 to 499 with OpenAI's error object; a status of 500, or a body of another shape, is wrong.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from assay.testing.tiny_models import save_model, tiny_model
from tests.judges.score import Score, checkout, checkout_version, first_words, packages

ASKS = "is this request, made by schemathesis from OpenAI's schema, answered as the schema says, or refused as OpenAI refuses?"
OPERATIONS = (("/models", "get"), ("/models/{model}", "get"), ("/completions", "post"), ("/chat/completions", "post"))
SAMPLING = {"prompt", "messages", "temperature", "top_p", "n", "stop", "seed", "logprobs", "top_logprobs", "presence_penalty",
            "frequency_penalty", "user"}
REQUESTS, NAME = 60, "tiny"
TOLD = [{"role": "user", "content": "Hello"}]


def judge(folder: Path) -> Score:
    file = checkout(folder, "openai-openapi", "openapi.json")
    score = Score(f"{packages('schemathesis')}; {checkout_version(folder, 'openai-openapi', [file])}")
    document = json.loads(file.read_text())
    document["paths"] = {path: {method: document["paths"][path][method]} for path, method in OPERATIONS}
    with tempfile.TemporaryDirectory() as scratch, served(Path(scratch)) as url:
        for path, method in OPERATIONS:
            put_requests(score, document, path, method, url)
    score.notes.append("most requests as made have fields that nobody knows; the draw of requests differs a little from run to run")
    return score


@contextlib.contextmanager
def served(scratch: Path) -> Iterator[str]:
    """The address of a real server on a tiny model."""
    model = save_model(scratch / NAME, tiny_model()).folder
    command = [sys.executable, "-m", "assay", "serve", str(model), "--port", "0", "--device", "cpu", "--grace", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            line = next(line for line in server.stdout or () if line.startswith("serving at "))
            yield line.split()[-1]
        finally:
            server.terminate()


def put_requests(score: Score, document: dict[str, Any], path: str, method: str, url: str) -> None:
    import hypothesis
    import schemathesis

    operation = schemathesis.openapi.from_dict(document)[path][method.upper()]
    made: list[Any] = []
    settings = hypothesis.settings(max_examples=REQUESTS, derandomize=True, deadline=None, database=None,
                                   phases=[hypothesis.Phase.generate], suppress_health_check=list(hypothesis.HealthCheck))
    hypothesis.given(case=operation.as_strategy())(settings(collected(made)))()
    for number, case in enumerate(made):
        put(score, f"{method} {path} {number}, as made", case, url)
        if isinstance(case.body, dict):
            case.body = {key: value for key, value in case.body.items() if key in SAMPLING} | {"model": NAME, "max_tokens": 4}
            if number % 2 and "messages" in case.body:
                case.body["messages"] = TOLD  # made ones are rarely a conversation
            put(score, f"{method} {path} {number}, sampling alone", case, url)
        elif "{model}" in path:
            case.path_parameters = {"model": NAME}
            put(score, f"{method} {path} {number}, our model", case, url)


def collected(made: list[Any]) -> Callable[..., None]:
    def keep(case: Any) -> None:
        made.append(case)
    return keep


def put(score: Score, name: str, case: Any, url: str) -> None:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import response_schema_conformance

    response = case.call(base_url=url, timeout=30)
    if 400 <= response.status_code < 500:
        words = error_words(response)
        if words is None:
            score.mistakes.append(f"{name}: status {response.status_code} without OpenAI's error object: {response.text[:100]!r}")
        else:
            score.refusals[f"status {response.status_code}"] += 1
        return
    try:
        case.validate_response(response, checks=[not_a_server_error, response_schema_conformance])
    except Exception as error:  # schemathesis gathers failures of several kinds in groups of its own
        score.mistakes.append(f"{name}: status {response.status_code}: {first_words(error, 200)}")
    else:
        score.right += 1


def error_words(response: Any) -> str | None:
    try:
        message = json.loads(response.content)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return None
    return message if isinstance(message, str) and message else None
