"""assay sample: generate text from a model, token by token where asked."""

import json
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from assay.config import argument, option
from assay.errors import UsageError
from assay.recipes.options import DEVICE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from assay.generate.engine import Engine
    from assay.generate.generation_request import Completion, GenerationRequest
    from assay.store.artifact import Artifact


@dataclass(frozen=True)
class FLAGS:
    """Generate text. A model with a chat template gets the prompt as a user's message, unless --raw."""

    path: str = argument("checkpoint, folder, adapter, GGUF file or fetched name")
    prompt: tuple[str, ...] = option("texts to continue or answer", group="generation", default=(), default_text="an empty one")
    n: int = option("samples per prompt", group="generation", default=1)
    max_new_tokens: int = option("the most tokens of a sample", group="generation", default=64)
    temperature: float = option("sampling temperature; 0: greedy", group="generation", default=0.7)
    top_k: int = option("sample among the N likeliest tokens; 0: all", group="generation", default=0)
    top_p: float = option("nucleus sampling: sample within this probability mass", group="generation", default=1.0)
    min_p: float = option("leave out tokens less likely than this share of the likeliest token", group="generation", default=0.0)
    repetition_penalty: float = option("above 1: tokens that occurred before become less likely", group="generation", default=1.0)
    stop: tuple[str, ...] = option("texts that end a sample; it stops before them", group="generation", metavar="TEXT", default=())
    seed: int = option("seed; the same seed gives the same text", group="generation", default=0)
    raw: bool = option("use no chat template", group="generation", default=False)
    tokens: bool = option("print a table of tokens: position, id, text, log-probability, special tokens marked", group="run",
                          default=False)
    base: str | None = option("base of an adapter that does not name its base", group="model", metavar="MODEL", default=None)
    steer: str | None = option("add a steering vector of this model, made by assay steer", group="model",
                               metavar="FILE[:SCALE]", default=None, default_text="none; its scale: the one it was measured at")
    device: str | None = option("where to compute: cpu, cuda or cuda:N", group="run", default=None,
                                default_text=DEVICE)
    dtype: Literal["float32", "bfloat16", "float16"] | None = option("number format to compute in", group="model", default=None,
                                                                     default_text="bfloat16 on a GPU, float32 elsewhere")
    json: bool = option("print JSON", group="run", default=False)


EXAMPLES = """  assay sample smollm2-135m --prompt 'Why is the sky blue?' --n 3
  assay sample runs/a/checkpoints/step-000500 --prompt 'Once upon' --raw --tokens --temperature 0
  assay sample smollm2-135m --prompt 'May I come in?' --steer vectors/polite:2
  assay sample smollm2-135m --prompt 'Name three rivers.' --min-p 0.05 --repetition-penalty 1.1 --stop '4.'"""

MOST = 100_000  # samples of a prompt: all of them are held in memory
MANY = 16_384  # tokens to make, from which on a GPU's steps are worth compiling


def sample_texts(flags: FLAGS) -> "list[Completion]":
    """Completions, prompt by prompt, and nothing printed."""
    from assay.model.placement import default_device
    from assay.store.artifact import open_artifact, straight_to

    artifact = open_artifact(flags.path, base=flags.base, to=straight_to(flags.device or default_device()))
    requests = sampling_requests(flags, artifact, stream=False)
    return generate_completions(engine_for(flags, artifact, requests), requests, "")


def run(flags: FLAGS) -> int:
    from assay.model.placement import default_device
    from assay.store.artifact import open_artifact, quarantines, straight_to

    artifact = open_artifact(flags.path, base=flags.base, to=straight_to(flags.device or default_device()))
    from assay.editing.steering import asked_steering

    for note in (*artifact.notes, *quarantines(artifact), *(() if flags.steer is None else asked_steering(flags.steer).notes)):
        print(f"note: {note}", file=sys.stderr if flags.json else sys.stdout)
    texts = [text for text in flags.prompt or ("",) for _ in range(flags.n)]
    live = len(texts) == 1 and not (flags.json or flags.tokens)
    requests = sampling_requests(flags, artifact, stream=live)
    prompts = [list(request.prompt) for request in requests]
    engine = engine_for(flags, artifact, requests)
    completions = generate_completions(engine, requests, f"> {texts[0]}\n" if live else "")
    if flags.json:
        steering = {} if flags.steer is None else {"steering": asked_steering(flags.steer).facts()}
        print(json.dumps([as_json(artifact, *row) | steering for row in zip(texts, prompts, completions, strict=True)], indent=1))
    elif flags.tokens:
        print("\n".join(transcript(artifact, *row) for row in zip(prompts, completions, strict=True)))
    elif live:
        print(f"{ending(completions[0])}\n")
    else:
        print("\n".join(f"> {text}\n{said.text}{ending(said)}\n" for text, said in zip(texts, completions, strict=True)))
    stop_if_not_drawn(engine, requests, completions)
    return 0


def stop_if_not_drawn(engine: "Engine", requests: "Sequence[GenerationRequest]", completions: "Sequence[Completion]") -> None:
    """Samples look like draws of the stated distribution, and have its probabilities without a cache: else they are no samples of it."""
    from assay.evaluation.soundness import DRAWN, DrawnTokens, judge_draws, judge_recorded, judge_rescored, rescored_draws
    from assay.guard.training_guards import stop_if_refuted

    model, sampling = engine.weights.source, requests[0].sampling
    samples = [(request.prompt, said.ids, sum(said.logprobs)) for request, said in zip(requests, completions, strict=True)]
    verdicts = [judge_rescored(model, samples, sampling), judge_recorded(model, samples, sampling)]
    if sampling.temperature > 0 and sampling.repetition_penalty == 1:
        found = DrawnTokens()
        for prompt, ids, _ in samples[:: max(1, -(-len(samples) // DRAWN))]:
            found += rescored_draws(model, prompt, ids, sampling) if ids else DrawnTokens()
        verdicts.append(judge_draws(found, sampling))
    stop_if_refuted(verdicts)


def sampling_requests(flags: FLAGS, artifact: "Artifact", *, stream: bool) -> "list[GenerationRequest]":
    """`n` of each prompt, each with a place of its own in the seed's stream."""
    from assay.generate.generation_request import GenerationRequest, Sampling

    if not 1 <= flags.n <= MOST:
        raise UsageError(f"assay sample: --n is {flags.n}; expected 1 to {MOST:,} samples per prompt")
    sampling = Sampling(flags.max_new_tokens, flags.temperature, flags.top_k, flags.top_p, flags.seed, flags.min_p,
                        flags.repetition_penalty)
    prompts = [encode_text(artifact, text, raw=flags.raw) for text in flags.prompt or ("",) for _ in range(flags.n)]
    return [GenerationRequest(tuple(prompt), sampling, (row,), stop=flags.stop, stream=stream) for row, prompt in enumerate(prompts)]


def engine_for(flags: FLAGS, artifact: "Artifact", requests: "Sequence[GenerationRequest]") -> "Engine":
    import torch

    from assay.editing.steering import asked_steering, steer_for_good
    from assay.generate.engine import Engine, fitting_slots
    from assay.model.placement import default_device, place_for_inference
    from assay.store.artifact import build_model

    dtype = getattr(torch, flags.dtype) if flags.dtype else None
    model = place_for_inference(build_model(artifact, None), flags.device or default_device(), compute=dtype)
    if flags.steer is not None:
        steer_for_good(model, asked_steering(flags.steer), artifact.digest)
    length = min(max(len(request.prompt) for request in requests) + flags.max_new_tokens, model.config.max_length)
    return Engine(model, slots=fitting_slots(model, len(requests), length), length=length, stop_ids=artifact.stops.stop_ids,
                  version=artifact.digest, tokenizer=artifact.tokenizer,
                  graphed=None if len(requests) * flags.max_new_tokens >= MANY else False)


def generate_completions(engine: "Engine", requests: "Sequence[GenerationRequest]", heading: str) -> "list[Completion]":
    """Generate completions; what is streamed is printed as it comes, under its heading."""
    place = {engine.submit(request): row for row, request in enumerate(requests)}
    print(heading, end="")
    done: dict[int, Completion] = {}
    while not engine.idle:
        for progress in engine.step():
            print(progress.text, end="", flush=bool(progress.text))
            if progress.completion is not None:
                done[place[progress.ticket]] = progress.completion
    return [done[row] for row in range(len(requests))]


def ending(completion: "Completion") -> str:
    return " […cut at --max-new-tokens]" if completion.ended == "length" else ""


def encode_text(artifact: "Artifact", text: str, *, raw: bool) -> list[int]:
    from assay.evaluation.loaded_model import prompt_token_ids

    if artifact.tokenizer is None:
        raise UsageError(f"{artifact.path}: there is no tokenizer here, so text means nothing to it; add tokenizer.json")
    ids = list(prompt_token_ids(artifact.tokenizer, text, raw=raw))
    if not ids and artifact.stops.bos is None and artifact.stops.eos is None:
        raise UsageError("an empty prompt needs a BOS or EOS token to begin from; give --prompt")
    return ids or [next(id for id in (artifact.stops.bos, artifact.stops.eos) if id is not None)]


def transcript(artifact: "Artifact", prompt: list[int], completion: "Completion") -> str:
    """One line a token; the prompt's have no log-probability, since nobody sampled them."""
    assert artifact.tokenizer is not None
    rows = [f"{'position':>8}  {'id':>7}  {'log p':>8}  text"]
    logprobs = [math.nan] * len(prompt) + list(completion.logprobs)
    for position, (token, logprob) in enumerate(zip([*prompt, *completion.ids], logprobs, strict=True)):
        mark = "  ← special" if token in artifact.tokenizer.special_ids else ""
        mark += "  ← stop" if token in artifact.stops.stop_ids and position >= len(prompt) else ""
        number = f"{logprob:8.3f}" if position >= len(prompt) else f"{'prompt':>8}"
        rows.append(f"{position:>8}  {token:>7}  {number}  {artifact.tokenizer.piece(token)!r}{mark}")
    return "\n".join([*rows, f"ended by: {completion.ended}\n"])


def as_json(artifact: "Artifact", text: str, prompt: list[int], completion: "Completion") -> dict:
    return {"prompt": text, "prompt_ids": prompt, "ids": list(completion.ids), "logprobs": list(completion.logprobs),
            "ended": completion.ended, "text": completion.text, "digest": artifact.digest}
