"""assay chat: talk with a model at the terminal, word by word, with its parent beside it where asked."""

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from assay.config import argument, option
from assay.errors import AssayError, UsageError
from assay.recipes.options import DEVICE

if TYPE_CHECKING:
    from assay.editing.steering import AskedSteering
    from assay.generate.engine import Engine
    from assay.generate.generation_request import Completion, GenerationRequest, Sampling
    from assay.store.artifact import Artifact

COMMANDS = """/save FILE     write the conversation as a row of chat data, which sft reads; a file that is there is not overwritten
/load ADAPTER  go on with this adapter on the model; the conversation stays
/reset         forget the conversation, not the system prompt
/probs         tokens of the last answer, and how probable the model itself holds each, whatever --temperature
/help          this list
/quit          leave; so does the end of the input (Ctrl-D). Ctrl-C cuts an answer short"""


@dataclass(frozen=True)
class FLAGS:
    """Chat with a model; answers are streamed, and the conversation is remembered. With --against a second model answers too.

    Lines beginning with / are commands: /save FILE, /load ADAPTER, /reset, /probs, /help, /quit. Messages may be piped in, one per
    line. A model without a chat template continues one text that both write on.
    """

    path: str = argument("checkpoint, folder, adapter, GGUF file or fetched name")
    against: str | None = option("a second model, such as the parent, which answers the same messages beside it, each with its own "
                                 "answers as history", group="model",
                                 metavar="MODEL", default=None)
    system: str | None = option("system prompt", group="generation", metavar="TEXT", default=None)
    max_new_tokens: int = option("the most tokens of an answer", group="generation", least=1, default=512)
    max_length: int = option("the most tokens of the whole conversation, within the model's context", group="generation", least=2,
                             default=4096)
    temperature: float = option("sampling temperature; 0: greedy", group="generation", least=0, default=0.7)
    top_p: float = option("nucleus sampling: sample within this probability mass", group="generation", above=0, most=1, default=1.0)
    seed: int = option("seed; the same seed and the same messages give the same answers", group="generation", default=0)
    base: str | None = option("base of an adapter that does not name its base", group="model", metavar="MODEL", default=None)
    steer: str | None = option("add a steering vector of this model, made by assay steer; --against answers without it", group="model",
                               metavar="FILE[:SCALE]", default=None, default_text="none; its scale: the one it was measured at")
    device: str | None = option("where to compute: cpu, cuda or cuda:N", group="run", default=None,
                                default_text=DEVICE)
    dtype: Literal["float32", "bfloat16", "float16"] | None = option("number format to compute in", group="model", default=None,
                                                                     default_text="bfloat16 on a GPU, float32 elsewhere")


EXAMPLES = """  assay chat smollm2-135m
  assay chat runs/a/model --against smollm2-135m --system 'Answer in one sentence.'
  assay chat smollm2-135m --against smollm2-135m --steer vectors/polite
  printf 'Why is the sky blue?\\n/probs\\n' | assay chat smollm2-135m --temperature 0"""


def run(flags: FLAGS) -> int:
    from assay.generate.generation_request import Sampling

    sampling = Sampling(flags.max_new_tokens, flags.temperature, top_p=flags.top_p, seed=flags.seed)
    speakers = [Speaker(flags.path, flags, base=flags.base, steer=flags.steer)]
    if flags.against is not None:
        speakers.append(Speaker(flags.against, flags, base=None))
    talk = Talk(speakers, sampling, flags)
    for text in user_lines():
        try:
            if not talk.heard(text):
                break
        except AssayError as error:
            if not sys.stdin.isatty():  # piped: whoever waits for the output must not take it for a whole conversation
                raise
            print(f"assay: {error}", file=sys.stderr)
    return 0


def user_lines() -> Iterator[str]:
    """Lines that the user writes, until the input ends."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    import readline  # noqa: F401  the arrow keys edit the line and bring back earlier ones

    print("/help lists the commands, Ctrl-D leaves")
    while True:
        try:
            yield input(emphasised("you: "))
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()


class Talk:
    """The speakers and what each has said: all hear the same, and each remembers its own answers."""

    def __init__(self, speakers: "list[Speaker]", sampling: "Sampling", flags: FLAGS):
        self.speakers, self.sampling, self.flags = speakers, sampling, flags
        self.turn = 0
        self.commands: dict[str, Callable[[str], None]] = {
            "/save": self.save, "/load": self.load, "/reset": lambda _: self.reset(), "/probs": lambda _: self.show_probabilities(),
            "/help": lambda _: print(COMMANDS)}

    def heard(self, text: str) -> bool:
        """Answers a message or obeys a command; False where the user leaves."""
        name, _, rest = text.strip().partition(" ")
        if name in ("/quit", "/exit"):
            return False
        if name in self.commands:
            self.commands[name](rest.strip())
        elif name.startswith("/") and name[1:].isalpha():
            raise UsageError(f"{name}: no such command; there are {', '.join(self.commands)} and /quit")
        elif name:
            self.answer(text)
        return True

    def answer(self, text: str) -> None:
        """Answer a message by every model. Nobody has heard a message that one of them has no room for."""
        requests = [speaker.request(text, self.sampling, self.turn) for speaker in self.speakers]
        for speaker, request in zip(self.speakers, requests, strict=True):
            if len(self.speakers) > 1 or sys.stdout.isatty():
                print(emphasised(f"{speaker.name}: "), end="", flush=True)
            speaker.answer(text, request)
            print(flush=True)
        self.turn += 1

    def save(self, name: str) -> None:
        import json

        from assay.store import durable

        path = Path(name)
        if not name:
            raise UsageError("/save: name the file, as in /save talk.jsonl")
        if path.exists():
            raise UsageError(f"/save {name}: it is there already and is not overwritten; name another file")
        rows = [{"messages": speaker.messages, "model": speaker.path, "digest": speaker.artifact.digest,
                 **({} if speaker.steering is None else {"steering": speaker.steering.facts()})} for speaker in self.speakers]
        durable.replace_file(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
        print(f"saved {name}: {len(self.speakers[0].messages)} messages")

    def load(self, adapter: str) -> None:
        """The adapter must be one of this model; the conversation goes on."""
        if not adapter:
            raise UsageError("/load: name the adapter, as in /load runs/a/adapter")
        from assay.store.artifact import locate_artifact

        if not locate_artifact(adapter).adapter:
            raise UsageError(f"/load {adapter}: a whole model, not an adapter; start assay chat with it")
        talked, first = self.speakers[0], self.speakers[0].origin
        if talked.steering is not None:
            raise UsageError(f"/load {adapter}: the model is steered by a vector of its own weights, which means nothing to an adapter's; "
                             "start again without --steer")
        loaded = Speaker(adapter, self.flags, base=first)
        loaded.said, loaded.origin = talked.said, first
        self.speakers[0] = loaded
        print(f"loaded {adapter} ({loaded.artifact.digest[:12]})")

    def reset(self) -> None:
        for speaker in self.speakers:
            speaker.said, speaker.last = [], None
        print("the conversation is forgotten")

    def show_probabilities(self) -> None:
        if any(speaker.last is None for speaker in self.speakers):
            raise UsageError("/probs: nothing was answered yet")
        for speaker in self.speakers:
            print(f"{speaker.name}\n{speaker.probabilities()}" if len(self.speakers) > 1 else speaker.probabilities())


class Speaker:
    """A model in a conversation. `said` are the messages so far without the system prompt, `last` is its newest completion."""

    def __init__(self, path: str, flags: FLAGS, *, base: str | None, steer: str | None = None):
        from assay.editing.steering import asked_steering
        from assay.model.placement import default_device
        from assay.store.artifact import open_artifact, quarantines, straight_to

        self.path = self.origin = path
        self.name = Path(path).name if Path(path).name not in ("model", "adapter") else path
        self.artifact: Artifact = open_artifact(path, base=base, to=straight_to(flags.device or default_device()))
        if self.artifact.tokenizer is None:
            raise UsageError(f"{path}: there is no tokenizer here, so text means nothing to it; add tokenizer.json")
        self.tokenizer = self.artifact.tokenizer
        self.steering = None if steer is None else asked_steering(steer)
        if self.steering is not None:
            self.name += f" + {Path(self.steering.path).name}"
        for note in (*self.artifact.notes, *quarantines(self.artifact), *(() if self.steering is None else self.steering.notes)):
            print(f"note: {note}", file=sys.stderr)
        if self.tokenizer.template is None and flags.system is not None:
            raise UsageError(f"{path}: it has no chat template, so there is no place for a system prompt; leave --system out")
        self.system = [] if flags.system is None else [{"role": "system", "content": flags.system}]
        self.said: list[dict[str, str]] = []
        self.asked: tuple[int, ...] = ()  # the tokens that its newest completion followed
        self.last: Completion | None = None
        self.engine = chat_engine(self.artifact, flags, self.steering)

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*self.system, *self.said]

    def request(self, text: str, sampling: "Sampling", turn: int) -> "GenerationRequest":
        """Request with the whole conversation and its new message, and as many new tokens as there is room for."""
        from assay.generate.generation_request import GenerationRequest

        ids = self._token_ids([*self.messages, {"role": "user", "content": text}])
        room = self.engine.length - len(ids)
        if room < 1:
            raise UsageError(f"the conversation has {len(ids):,} tokens and {self.name} has room for {self.engine.length:,}; "
                             "/reset, or a larger --max-length where the model's context allows it")
        return GenerationRequest(ids, replace(sampling, max_new=min(sampling.max_new, room)), (turn,), stream=True)

    def answer(self, text: str, request: "GenerationRequest") -> None:
        """Print the answer as it comes, and remember it once it is shown to be a draw of the model."""
        from assay.verbs.sample import stop_if_not_drawn

        self.asked, self.last = request.prompt, self._streamed(request)
        if self.last.ended == "length":
            print(emphasised(" […cut at --max-new-tokens or --max-length]"), end="")
        self.said += [{"role": "user", "content": text}, {"role": "assistant", "content": self.last.text or ""}]
        if self.last.ids:
            stop_if_not_drawn(self.engine, [request], [self.last])

    def _streamed(self, request: "GenerationRequest") -> "Completion":
        ticket, completion = self.engine.submit(request), None
        while completion is None:
            try:
                steps = self.engine.step()
            except KeyboardInterrupt:
                steps = self.engine.cancel(ticket)
            for progress in steps:
                print(seen(progress.text), end="", flush=True)
                completion = progress.completion or completion
        return completion

    def _token_ids(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        if self.tokenizer.template is None:
            return tuple(self.tokenizer.encode("".join(message["content"] for message in messages), special=True))
        return tuple(self.tokenizer.encode(self.tokenizer.render(messages, add_generation_prompt=True)))

    def probabilities(self) -> str:
        """One line a token of the last answer, with its probability at temperature 1 and without truncation."""
        from assay.evaluation.loaded_model import PLAIN_SAMPLING
        from assay.generate.policy_logprobs import completion_logprobs

        assert self.last is not None
        scored = completion_logprobs(self.engine.weights.source, [(self.asked, self.last.ids)], PLAIN_SAMPLING) if self.last.ids else []
        logprobs = [value for found in scored for value in found.tolist()]
        rows = [f"  {math.exp(logprob):7.2%}  {seen(repr(self.tokenizer.piece(token)))}"
                for token, logprob in zip(self.last.ids, logprobs, strict=True)]
        whole = math.fsum(logprobs)
        return "\n".join([*rows, f"  {len(rows)} tokens, {whole:.3f} nats in all, ended by: {self.last.ended}"])


def chat_engine(artifact: "Artifact", flags: FLAGS, steering: "AskedSteering | None" = None) -> "Engine":
    import torch

    from assay.editing.steering import steer_for_good
    from assay.generate.engine import Engine
    from assay.model.placement import default_device, place_for_inference
    from assay.store.artifact import build_model

    dtype = getattr(torch, flags.dtype) if flags.dtype else None
    model = place_for_inference(build_model(artifact, None), flags.device or default_device(), compute=dtype)
    if steering is not None:
        steer_for_good(model, steering, artifact.digest)
    return Engine(model, slots=1, length=min(flags.max_length, model.config.max_length), stop_ids=artifact.stops.stop_ids,
                  version=artifact.digest, tokenizer=artifact.tokenizer, graphed=False)


def seen(text: str) -> str:
    """Printable text: what a model says moves no cursor and paints nothing."""
    from assay.report.templates import visible

    return visible(text)


def emphasised(text: str) -> str:
    """Text in bold at a terminal, unless NO_COLOR is set; what is piped stays plain."""
    plain = os.environ.get("NO_COLOR") or not sys.stdout.isatty()
    return text if plain else f"\033[1m{text}\033[0m"
