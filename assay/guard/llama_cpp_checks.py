"""llama.cpp checks of a GGUF file: opened, tokenised, scored and continued by the library that will run it, against its source.

Rounded weights answer otherwise, so what is compared is what rounding may not change: the ids of every text, exactly; how surprised
the model is by a text, within a band; and greedy texts, which the source itself must find about as likely as its own.
"""

import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from assay.generate.engine import sample
from assay.generate.generation_request import Sampling
from assay.guard.behaviour_checks import short_prompts
from assay.guard.proving_process import proof_threads
from assay.health.probe_prompts import BUILT_IN_PROMPTS, TEXT_BEGINNINGS
from assay.model.gguf_tokenizer import HARD
from assay.model.tokenizer import Tokenizer
from assay.model.transformer import Transformer
from assay.store.artifact import Artifact, build_model, open_artifact
from assay.store.gguf_header import read_gguf_header
from assay.store.llama_cpp import LLAMA_CPP_MISSING, ask_llama_cpp, llama_cpp_installed
from assay.verdict import Verdict, proven, refuted, unproven

ROW_TOKENS, MOST_ROWS = 96, 4
SAID_TOKENS = 24
READ_SECONDS = 1800.0
# By the coarsest type in a file: how many nats a token the mean surprise may change, and how much less likely than its own choice,
# on average, the source may find a token that the file chose. At least twice what was seen in SmolLM2-135M, from which they were chosen;
# Gemma-3-270M, measured afterwards, stays within half of them (results/quantised.txt).
SURPRISE_BAND = {"q4_k": 0.3, "q4_0": 0.3, "q4_1": 0.3, "q5_k": 0.3, "q5_0": 0.3, "q5_1": 0.3, "q6_k": 0.1, "q8_0": 0.05}
REGRET_BAND = {name: 2 * band for name, band in SURPRISE_BAND.items()}
COMPUTED = 0.3  # nats a token between two ways to compute one file, on average: llama.cpp rounds activations to 8 bits
FLOAT_BAND = 0.02  # of 16-bit floats; llama.cpp rounds activations too


@dataclass(frozen=True)
class LlamaReading:
    """Questions to llama.cpp about a file, and the source's answers to the same."""

    texts: tuple[str, ...]
    rows: tuple[list[int], ...]
    prompts: tuple[list[int], ...]
    stops: tuple[int, ...]

    def request(self, file: Path) -> dict[str, Any]:
        return {"do": "read", "file": str(file), "texts": self.texts, "rows": self.rows, "prompts": self.prompts, "stops": self.stops,
                "new": SAID_TOKENS, "threads": proof_threads(beside=False)}


def check_in_llama_cpp(file: Path, source: Artifact) -> list[Verdict]:
    """Three verdicts, or one where llama.cpp is not there, does not open the file or dies of it."""
    if not llama_cpp_installed():
        return [unproven("llama.cpp", f"not loaded where it will run: {LLAMA_CPP_MISSING}", optional=True)]
    if source.tokenizer is None:
        return [unproven("llama.cpp", f"not asked: {source.path} has no tokenizer, so that no text can be compared", optional=True)]
    reading = planned_reading(source, source.tokenizer)
    found = ask_llama_cpp(reading.request(file), READ_SECONDS)
    if (trouble := found.get("error")) is not None:
        return [refuted("llama.cpp", f"llama.cpp does not run {file.name}: {trouble}", **found)]
    model = build_model(source).float().eval()
    runner = f"llama.cpp (llama-cpp-python {found['version']})"
    kind = coarsest_type(file)
    rounded = build_model(open_artifact(file)).float().eval()
    return [judge_ids(reading, source.tokenizer, found, runner), judge_surprise(reading, model, rounded, found, kind, runner),
            judge_generations(reading, source, model, found, kind, runner)]


def planned_reading(source: Artifact, tokenizer: Tokenizer) -> LlamaReading:
    longest = source.config.max_length
    room = min(ROW_TOKENS, longest)
    said = min(SAID_TOKENS, longest // 2)
    first = [] if source.stops.bos is None else [source.stops.bos]
    whole = tokenizer.encode("\n".join(prompt.text for prompt in (*TEXT_BEGINNINGS, *BUILT_IN_PROMPTS)))
    step = room - len(first)
    rows = tuple(first + whole[start:start + step] for start in range(0, len(whole), step))[:MOST_ROWS]
    stops = [id for id in (source.stops.eos, source.stops.turn_end) if id is not None and id in source.stops.stop_ids]
    return LlamaReading(texts_that_must_agree(tokenizer), tuple(row for row in rows if len(row) > 1),
                   tuple(short_prompts(source, longest - said)), tuple(dict.fromkeys(stops)))


def texts_that_must_agree(tokenizer: Tokenizer) -> tuple[str, ...]:
    """llama.cpp applies no Unicode normalisation: where the tokenizer has one, texts that it changes are left out."""
    chat = [tokenizer.render([{"role": "user", "content": "Say yes."}], add_generation_prompt=True)] if tokenizer.template else []
    normalised = tokenizer.document.get("normalizer") is not None
    return tuple(text for text in (*HARD, *(prompt.text for prompt in TEXT_BEGINNINGS), *chat)
                 if not normalised or unicodedata.is_normalized("NFC", text))


def coarsest_type(file: Path) -> str:
    """Tensor type of a GGUF file that has the widest band."""
    types = {tensor.type.lower() for tensor in read_gguf_header(file).tensors.values()}
    return max(sorted(types), key=lambda name: SURPRISE_BAND.get(name, 0.0))

# ---------------------------------------------------------------- what is judged


def judge_ids(reading: LlamaReading, tokenizer: Tokenizer, found: dict[str, Any], runner: str) -> Verdict:
    due = [tokenizer.encode(text) for text in reading.texts]
    apart = [(text, ids, theirs) for text, ids, theirs in zip(reading.texts, due, found["texts"], strict=True) if ids != theirs]
    if apart:
        text, ids, theirs = apart[0]
        return refuted("llama ids", f"{runner} reads {len(apart)} of {len(due)} texts as other tokens than the source does: {text!r} as "
                                    f"{theirs[:12]}, expected {ids[:12]}", texts=[text for text, _, _ in apart])
    if deaf := sorted(set(reading.stops) - set(found["ends"])):
        return refuted("llama ids", f"{runner} does not end a text at token {deaf[0]} ({tokenizer.decode([deaf[0]])!r}), which ends "
                                    "the source's", stops=deaf)
    return proven("llama ids", f"{runner} reads {len(due)} texts as the source's tokens, and stops where it stops", n=len(due),
                  version=found["version"])


def judge_surprise(reading: LlamaReading, model: Transformer, rounded: Transformer, found: dict[str, Any], kind: str,
                   runner: str) -> Verdict:
    """Mean surprise over the same tokens, whose exponential is perplexity, against the source; and token by token against what Assay
    computes of the very same bytes."""
    ours, of_file = (torch.cat([token_logps(one, row) for row in reading.rows]) for one in (model, rounded))
    theirs = torch.tensor([value for row in found["rows"] for value in row], dtype=torch.float64)
    band, change = SURPRISE_BAND.get(kind, FLOAT_BAND), float((ours - theirs).mean())
    perplexities = [float((-values.mean()).exp()) for values in (theirs, ours)]
    apart = float((of_file - theirs).abs().mean())
    words = (f"in {runner} its perplexity is {perplexities[0]:.4g}, the source's {perplexities[1]:.4g}: {change:+.4f} nats a token over "
             f"{len(ours)} tokens, band of {kind} {band:g}; Assay's own reading of the file gives each token {apart:.4f} more or less, at "
             f"most {COMPUTED:g}")
    evidence = {"computed": str(apart), "perplexity": perplexities[0], "source_perplexity": perplexities[1], "nats": str(change),
                "band": band, "n": len(ours)}
    if not apart <= COMPUTED:
        return refuted("llama perplexity", f"{words}: llama.cpp computes another model of these bytes", **evidence)
    if not abs(change) <= band:
        return refuted("llama perplexity", f"{words}: what runs there is not the source, rounded", **evidence)
    return proven("llama perplexity", words, **evidence)


def judge_generations(reading: LlamaReading, source: Artifact, model: Transformer, found: dict[str, Any], kind: str,
                      runner: str) -> Verdict:
    """Rounding turns a choice only where two tokens were about as likely: the source says how much it would have lost."""
    own = sample(model, [list(prompt) for prompt in reading.prompts], source.stops.stop_ids,
                 Sampling(max_new=min(SAID_TOKENS, source.config.max_length // 2), temperature=0), graphed=False)
    pairs = list(zip(reading.prompts, found["generations"], strict=True))
    losses = torch.cat([choice_losses(model, prompt, said) for prompt, said in pairs])
    same = sum(list(completion.ids) == said for completion, (_, said) in zip(own, pairs, strict=True))
    band, lost = REGRET_BAND.get(kind, FLOAT_BAND), float(losses.mean())
    assert source.tokenizer is not None
    decode = source.tokenizer.decode
    words = (f"{same} of {len(pairs)} greedy texts of {runner} are the source's own; the source finds their tokens less likely than its "
             f"choice by {lost:.4f} nats on average, band of {kind} {band:g}")
    evidence = {"nats": str(lost), "band": band, "same": same, "n": len(pairs), "texts": [decode(said) for _, said in pairs],
                "source_texts": [decode(completion.ids) for completion in own]}
    if not lost <= band:
        return refuted("llama generations", f"{words}: it says what the source would not", **evidence)
    return proven("llama generations", words, **evidence)


@torch.no_grad()
def _logps(model: Transformer, row: list[int]) -> torch.Tensor:
    tokens = torch.tensor([row])
    return model.logits(model.hidden(tokens))[0].double().log_softmax(-1)


def token_logps(model: Transformer, row: list[int]) -> torch.Tensor:
    return _logps(model, row)[:-1].gather(1, torch.tensor(row[1:])[:, None])[:, 0]


def choice_losses(model: Transformer, prompt: list[int], said: list[int]) -> torch.Tensor:
    logps = _logps(model, [*prompt, *said])[len(prompt) - 1:-1]
    return logps.max(-1).values - logps.gather(1, torch.tensor(said)[:, None])[:, 0]
