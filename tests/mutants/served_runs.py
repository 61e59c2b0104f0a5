"""Served runs: `assay serve` is started, spoken to as a client would, and stopped; what it answered is left in answers.json.

    python -m tests.mutants.served_runs SCRIPT …

A request that should be answered and is refused ends the script with exit 1, or 4 where a guard refused to train.
"""

import contextlib
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Answers = dict[str, Any]
ADD = {"type": "function", "function": {"name": "calculate", "parameters": {
    "type": "object", "properties": {"expression": {"enum": ["1+1", "2*3"]}}, "required": ["expression"], "additionalProperties": False}}}
STOP = {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}}
COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}, "dark": {"type": "boolean"}},
          "required": ["colour", "dark"], "additionalProperties": False}
GREEDY = {"prompt": "4+5=", "max_tokens": 8, "temperature": 0}  # what the plain sampler was asked too: greedy.json
NARROW = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.3}


def main(script: str, words: list[str]) -> int:
    answers: Answers = {}
    try:
        return SCRIPTS[script](words, answers)
    except urllib.error.HTTPError as error:
        return refused(str(json.loads(error.read())["error"]["message"]))
    finally:
        Path("answers.json").write_text(json.dumps(answers))


def refused(message: str) -> int:
    print(message, file=sys.stderr)
    return 4 if "not trained: " in message or "not recorded: " in message else 1


@contextlib.contextmanager
def served(words: list[str]) -> Iterator[str]:
    """The address of a server that ends with the block, as a signal ends it."""
    server = subprocess.Popen(assay("serve", *words, "--port", "0", "--device", "cpu", "--max-length", "256"), stdout=subprocess.PIPE,
                              text=True)
    assert server.stdout is not None
    url = ""
    while not url:
        line = server.stdout.readline()
        if not line:
            sys.exit(server.wait() or 1)
        print(line, end="")
        url = "".join(re.findall(r"^serving at (\S+)", line))
    try:
        yield url
    finally:
        server.send_signal(signal.SIGTERM)
        print(server.stdout.read(), end="")
        code = server.wait()
    if code != 128 + signal.SIGTERM:
        sys.exit(code or 1)


def assay(*words: str) -> list[str]:
    return [sys.executable, "-m", "assay", *words]


def ask(url: str, body: dict[str, Any] | None = None, method: str | None = None, headers: dict[str, str] | None = None) -> Any:
    """The reply: an object, a list of streamed events, or text."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})}, method=method)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as reply:
        text, kind = reply.read().decode(), reply.headers["content-type"]
    if kind.startswith("text/event-stream"):
        return [line.removeprefix("data: ") if line.endswith("]") else json.loads(line[6:]) for line in text.splitlines() if line]
    return json.loads(text) if kind == "application/json" else text.splitlines()


def refusal(url: str, body: dict[str, Any], method: str | None = None) -> dict[str, Any]:
    try:
        ask(url, body, method)
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.loads(error.read())["error"]}
    return {"status": 200}


def without_reasons(listed: Any) -> Any:
    """A model as it is listed; the words of its verdicts are printed when it is opened."""
    return {name: value for name, value in listed.items() if name != "verdicts"}


def chat(content: str = "4+5=", **options: Any) -> dict[str, Any]:
    return {"model": "base", "messages": [{"role": "user", "content": content}], "max_tokens": 8, **options}


def plain_answers(words: list[str], answers: Answers) -> int:
    """Chats and texts of a model that knows nothing, whose every token is a draw; adapters; and what is refused."""
    words, seed = seed_of(words)
    with served(words) as url:
        said, spoken = f"{url}/completions", f"{url}/chat/completions"
        answers["greedy"] = found = ask(said, {"model": "base", **GREEDY})
        answers["as sampled"] = found["choices"][0]["text"] == json.loads(Path("greedy.json").read_text())
        answers["drawn"] = ask(spoken, chat(seed=seed, n=2, temperature=1.5))
        answers["ranked"] = ask(spoken, chat(seed=seed, logprobs=True, top_logprobs=3, return_token_ids=True, **NARROW))
        answers["under"] = ask(spoken, chat(seed=seed, logprobs=True, logprobs_under="model", **NARROW))
        answers["streamed"] = ask(spoken, chat(seed=seed, n=2, stream=True, stream_options={"include_usage": True}, logprobs=True))
        answers["same"] = [text_of(answers["streamed"], place) == choice["message"]["content"] for place, choice in
                           enumerate(ask(spoken, chat(seed=seed, n=2))["choices"])]
        text = ask(spoken, chat(seed=seed, max_completion_tokens=20))["choices"][0]["message"]["content"]
        answers["stopped"] = ask(spoken, chat(seed=seed, max_tokens=20, stop=["never said", text[4:6] or "nor this"]))
        history = [{"role": "system", "content": "Add."}, {"role": "user", "content": [{"type": "text", "text": "1+"}, {
            "type": "text", "text": "1="}]}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2="}]
        answers["history"] = ask(spoken, chat(seed=seed, messages=history, return_token_ids=True))
        answers["unlimited"] = ask(spoken, {key: value for key, value in chat(seed=seed).items() if key != "max_tokens"})["usage"]
        answers["texts"] = ask(said, {"model": "base", "prompt": ["2+3=", "4+4="], "n": 2, "seed": seed, "max_tokens": 6, "logprobs": 2})
        ids = answers["ranked"]["choices"][0]["prompt_token_ids"]
        answers["ids"] = ask(said, {"model": "base", "prompt": ids, "seed": seed, "stream": True, "logprobs": 0, "return_token_ids": True})
        answers["empty"] = ask(said, {"model": "base", "prompt": "", "seed": seed, "user": "nobody"})
        answers["tuned"] = ask(spoken, chat(model="tuned", seed=seed, logprobs=True))
        answers["joined"] = without_reasons(ask(f"{url}/adapters", {"name": "again", "path": "tuned"}))
        answers["again"] = ask(spoken, chat(model="again", seed=seed))
        answers["models"] = [without_reasons(model) for model in ask(f"{url}/models")["data"]]
        answers["model"] = without_reasons(ask(f"{url}/models/tuned"))
        answers["retired"] = ask(f"{url}/adapters/again", method="DELETE")
        for number, wrong in enumerate(({"model": "again"}, {"temperature": 3}, {"top_p": 0}, {"n": 0}, {"stop": ["a"] * 5},
                                        {"max_tokens": 500}, {"top_logprobs": 2}, {"surprise": 1}, {"logit_bias": {"5": 1}},
                                        {"messages": []}, {"stream": "yes"}, {"tools": [ADD]}, {"logprobs_under": "none"}, {"seed": 0.5},
                                        {"stream": True, "logprobs": True, "top_logprobs": 1}, {"stream_options": {}})):
            answers[f"refused {number}"] = refusal(spoken, chat(seed=seed) | wrong)
        answers["refused text"] = refusal(said, {"model": "base", "prompt": [], "best_of": 2})
        answers["best of"] = refusal(said, {"model": "base", "prompt": "a", "best_of": 2})
        answers["no training"] = refusal(f"{url}/trajectories", {})
        answers["no weights"] = refusal(f"{url}/weights", {"path": "base", "version": "1"})
        answers["health"], answers["metrics"] = ask(f"{url.removesuffix('/v1')}/health"), ask(f"{url.removesuffix('/v1')}/metrics")
    return 0


def text_of(events: list[Any], place: int) -> str:
    return "".join(choice["delta"].get("content") or "" for event in events if isinstance(event, dict) for choice in event["choices"]
                   if choice["index"] == place)


def forms(words: list[str], answers: Answers) -> int:
    """Tools and JSON: what a model that calls a calculator says of its own accord, and what it must say."""
    words, seed = seed_of(words)
    asked = {"model": "caller", "max_tokens": 90, "seed": seed, "tools": [ADD, STOP]}
    call = {"id": "call00001", "type": "function", "function": {"name": "calculate", "arguments": '{"expression": "1+1"}'}}
    history = [{"role": "user", "content": "17+10="}, {"role": "assistant", "content": None, "tool_calls": [call]},
               {"role": "tool", "content": "2", "tool_call_id": "call00001"}]
    first = history[:1]
    with served(words) as url:
        spoken = f"{url}/chat/completions"
        answers["free"] = ask(spoken, asked | {"messages": first, "return_token_ids": True})
        answers["streamed"] = ask(spoken, asked | {"messages": first, "stream": True})
        answers["after"] = ask(spoken, asked | {"messages": history, "return_token_ids": True, "temperature": 0})
        answers["warm"] = ask(spoken, asked | {"messages": first, "temperature": 2.0, "max_tokens": 30})
        answers["none"] = ask(spoken, asked | {"messages": first, "tool_choice": "none", "return_token_ids": True})
        answers["required"] = ask(spoken, asked | {"messages": first, "tool_choice": "required", "temperature": 2.0})
        named = {"type": "function", "function": {"name": "stop"}}
        answers["named"] = ask(spoken, asked | {"messages": first, "tool_choice": named, "stream": True})
        plain = {name: value for name, value in asked.items() if name != "tools"} | {"messages": first}
        schema = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR}}
        answers["schema"] = ask(spoken, plain | {"response_format": schema, "n": 2, "logprobs": True, "temperature": 1.5})
        answers["object"] = ask(spoken, plain | {"response_format": {"type": "json_object"}, "max_tokens": 12})
        for number, wrong in enumerate(({"tool_choice": {"type": "function", "function": {"name": "none"}}}, {"tools": [{}]},
                                        {"tools": [ADD, ADD]}, {"response_format": schema}, {"tools": [], "tool_choice": "required"},
                                        {"parallel_tool_calls": False}, {"response_format": {"type": "yaml"}},
                                        {"messages": [{"role": "user"}]}, {"messages": [first[0] | {"tool_calls": [call]}]},
                                        {"messages": [{"role": "assistant", "tool_calls": [call | {"function": {"name": 1}}]}]})):
            answers[f"refused {number}"] = refusal(spoken, asked | {"messages": first} | wrong)
    return 0


def learns(words: list[str], answers: Answers) -> int:
    """Two updates on conversations of an agent with a tool, then the proof of what was saved."""
    from assay.client import Policy
    from assay.errors import UsageError

    words, seed = seed_of(words)
    try:
        with served(words) as url:
            policy = Policy(url)
            for update in range(2):
                groups = [[conversation(policy, Path(words[0]).name, seed + 100 * update + 10 * group + member, member) for member in
                           range(4)] for group in range(2)]
                left = [conversation(policy, Path(words[0]).name, seed + 98 + member, member) for member in range(2)]
                answers[f"update {update}"] = {name: value for name, value in policy.train(groups).items() if name != "verdicts"}
                for name, refused_group in {"stale": left, "again": groups[0], "one": left[:1]}.items():
                    try:
                        policy.train([refused_group])
                    except UsageError as error:
                        why = str(error).partition(": ")[2]
                        if not why:  # the client knows that it was refused, and not why
                            return refused(str(error))
                        answers[f"{name} {update}"] = re.sub(r"traj-\w+", "@", why)
    except UsageError as error:
        return refused(str(error))
    return subprocess.run(assay("prove", "run/checkpoints/step-000002")).returncode


def conversation(policy: Any, model: str, seed: int, member: int) -> str:
    """Two turns with a tool's answer between them, of which every third rewrites the history; the last of a group crashes."""
    with contextlib.suppress(ZeroDivisionError), policy.trajectory(reward=lambda made: float(member % 2)) as made:
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"1{seed}+4="}]
        for turn in range(2):
            body = {"model": model, "messages": messages, "max_tokens": 60 if model == "caller" else 6, "seed": seed + turn,
                    **({"tools": [ADD]} if model == "caller" else {})}
            said = ask(f"{policy.url}/chat/completions", body, headers=made.headers)["choices"][0]["message"]
            if member == 2:
                said = {"role": "assistant", "content": "so"}
            calls = said.get("tool_calls") or [{}]
            heard = {"role": "tool", "tool_call_id": calls[0]["id"]} if calls[0] else {"role": "user"}
            messages = [*messages, said, {**heard, "content": "2"}]
        made.answer = 1 / (3 - member)
    return str(made.id)


def rollouts(words: list[str], answers: Answers) -> int:
    """A GRPO run whose completions another process draws, with the weights that it is handed."""
    with served(["taught", "--rollouts", "--slots", "1"]) as url:
        code = subprocess.run(assay(*words, "--vllm-server-base-url", url)).returncode
        answers["models"] = [without_reasons(model) for model in ask(f"{url}/models")["data"]]
    return code


def seed_of(words: list[str]) -> tuple[list[str], int]:
    if "--seed" not in words:
        return words, 3
    at = words.index("--seed")
    return [*words[:at], *words[at + 2:]], int(words[at + 1]) % 1000


SCRIPTS: dict[str, Callable[[list[str], Answers], int]] = {"plain": plain_answers, "forms": forms, "learns": learns, "rollouts": rollouts}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
