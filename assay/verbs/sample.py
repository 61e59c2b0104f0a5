"""assay sample: text from a model, token by token where asked."""

import json
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from assay.config import argument, option
from assay.errors import UsageError

if TYPE_CHECKING:
    from assay.generate.sampler import Completion
    from assay.store.artifact import Artifact


@dataclass(frozen=True)
class FLAGS:
    """Generate text. A model with a chat template gets the prompt as a user's message, unless --raw."""

    path: str = argument("checkpoint, folder, adapter, GGUF file or fetched name")
    prompt: tuple[str, ...] = option("what to continue or answer", default=())
    n: int = option("samples per prompt", default=1)
    max_new: int = option("most tokens per sample", default=64)
    temperature: float = option("0 is greedy", default=0.7)
    top_k: int = option("sample among the k likeliest; 0: all", default=0)
    top_p: float = option("sample within this probability mass", default=1.0)
    seed: int = option("seed; the same seed gives the same text", default=0)
    raw: bool = option("no chat template", default=False)
    tokens: bool = option("print the token-level transcript: position, id, text, log-probability, special tokens marked", default=False)
    base: str | None = option("an adapter's base, where the adapter does not name it", default=None)
    json: bool = option("print JSON", default=False)


EXAMPLES = """  assay sample smollm2-135m --prompt 'Why is the sky blue?' --n 3
  assay sample runs/a/checkpoints/step-000500 --prompt 'Once upon' --raw --tokens --temperature 0"""

MOST = 100_000  # samples of a prompt: all of them are held in memory


def run(flags: FLAGS) -> int:
    from assay.generate.sampler import Sampling, sample
    from assay.store.artifact import build, open_artifact

    if not 1 <= flags.n <= MOST:
        raise UsageError(f"assay sample: --n is {flags.n}; expected 1 to {MOST:,} samples per prompt")
    artifact = open_artifact(flags.path, base=flags.base)
    for note in artifact.notes:
        print(f"note: {note}", file=sys.stderr if flags.json else sys.stdout)
    texts = [text for text in flags.prompt or ("",) for _ in range(flags.n)]
    prompts = [encoded(artifact, text, raw=flags.raw) for text in texts]
    sampling = Sampling(flags.max_new, flags.temperature, flags.top_k, flags.top_p, flags.seed)
    completions = sample(build(artifact), prompts, artifact.stops.stop_ids, sampling)
    if flags.json:
        print(json.dumps([as_json(artifact, *row) for row in zip(texts, prompts, completions, strict=True)], indent=1))
        return 0
    for text, prompt, completion in zip(texts, prompts, completions, strict=True):
        print(transcript(artifact, prompt, completion) if flags.tokens else shown(artifact, text, completion))
    return 0


def encoded(artifact: "Artifact", text: str, *, raw: bool) -> list[int]:
    if artifact.tokenizer is None:
        raise UsageError(f"{artifact.path}: there is no tokenizer here, so text means nothing to it; add tokenizer.json")
    if artifact.tokenizer.template is not None and not raw:
        return artifact.tokenizer.encode(artifact.tokenizer.render([{"role": "user", "content": text}], add_generation_prompt=True))
    ids = artifact.tokenizer.encode(text, special=True)
    if not ids and artifact.stops.bos is None and artifact.stops.eos is None:
        raise UsageError("an empty prompt needs a BOS or EOS token to begin from; give --prompt")
    return ids or [next(id for id in (artifact.stops.bos, artifact.stops.eos) if id is not None)]


def shown(artifact: "Artifact", text: str, completion: "Completion") -> str:
    assert artifact.tokenizer is not None
    ending = "" if completion.ended == "stop" else " […cut at --max-new]"
    return f"> {text}\n{artifact.tokenizer.decode(completion.ids, special=False)}{ending}\n"


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
    assert artifact.tokenizer is not None
    return {"prompt": text, "prompt_ids": prompt, "ids": list(completion.ids), "logprobs": list(completion.logprobs),
            "ended": completion.ended, "text": artifact.tokenizer.decode(completion.ids, special=False), "digest": artifact.digest}
