"""assay probe: check the generations of a saved artifact or an OpenAI-compatible endpoint for degenerate texts."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.config import argument, option
from assay.errors import UsageError
from assay.recipes.options import DEVICE
from assay.verbs.terminal import line_printer
from assay.verdict import Outcome, overall

if TYPE_CHECKING:
    from assay.generate.generation_request import Sampling
    from assay.health.generation_probe import EndpointGenerator, Health, ModelGenerator
    from assay.health.probe_prompts import ProbePrompt


@dataclass(frozen=True)
class FLAGS:
    """Sample from a model on prompts of several domains and classify every text: endless repetition, word soup (with --against),
    wrong script, code or sums where prose was asked, missing tags, cut off at the token limit, empty, the same whatever is asked. The
    rate of malformed texts has an anytime-valid interval, and sampling ends as soon as the rate is shown to be too high."""

    artifact: str | None = argument("checkpoint, folder, adapter, GGUF file, fetched name, or http(s)://…/v1; required without "
                                    "--history", default=None)
    against: str | None = option("parent model, compared prompt by prompt and used to recognise word soup", group="method", metavar="MODEL",
                                 default=None)
    history: str | None = option("run whose checkpoints are probed, to find the first malformed one",
                                 group="method", metavar="RUN", default=None)
    prompts: str | None = option("your own prompts: JSON lines with `prompt` (a text, or a list of messages that ends with the user's), "
                                 "and optionally id, domain and what is expected: script, code, numbers, short, tags, ends; or .txt, one "
                                 "per line", group="data", metavar="FILE", default=None,
                                 default_text="ours, of several domains")
    n: int | None = option("samples for each prompt", group="generation", short="-n", least=1, default=None,
                           default_text="as many as exclude a rate of 10 % where all are clean")
    max_new_tokens: int = option("the most tokens of a sample", group="generation", least=1, default=512)
    temperature: float = option("sampling temperature; 0: greedy, with one sample for each prompt",
                                group="generation", least=0, default=0.7)
    top_p: float = option("nucleus sampling: sample within this probability mass", group="generation", above=0, most=1, default=1.0)
    seed: int = option("seed of the sampling", group="generation", default=0)
    tolerate: float = option("share of malformed texts that is tolerated", group="method", least=0, below=1, default=0.05)
    base: str | None = option("base of an adapter that does not name its base", group="model", metavar="MODEL", default=None)
    device: str | None = option("where to compute: cpu or cuda", group="run", default=None,
                                default_text=DEVICE)
    model: str | None = option("name of the model, at an endpoint that serves several", group="model", metavar="NAME", default=None)
    key_env: str | None = option("environment variable that holds the endpoint's key", group="model", metavar="NAME", default=None)
    json: bool = option("print JSON, every text included", group="run", default=False)


EXAMPLES = """  assay probe runs/a/checkpoints/step-000500 --against smollm2-135m
  assay probe --history runs/a -n 2
  assay probe http://127.0.0.1:8000/v1 --prompts mine.jsonl --json"""


def run(flags: FLAGS) -> int:
    from assay.generate.generation_request import Sampling

    if (flags.artifact is None) == (flags.history is None):
        raise UsageError("assay probe: name one artifact or endpoint, or a run with --history")
    if not 0 < flags.tolerate < 1:
        raise UsageError(f"--tolerate {flags.tolerate}: expected a share between 0 and 1")
    sampling = Sampling(flags.max_new_tokens, flags.temperature, 0, flags.top_p, flags.seed)
    return run_history(flags, sampling) if flags.history is not None else run_one(flags, sampling)


def run_one(flags: FLAGS, sampling: "Sampling") -> int:
    from assay.health.generation_probe import compare_health, probe

    assert flags.artifact is not None
    generator = generator_of(flags.artifact, flags, sampling)
    prompts = prompts_for(flags, generator)
    n, verdicts, parent = rounds(flags, len(prompts)), [], None
    if flags.against is not None:
        other = load_generator(flags.against, flags, sampling, base=None)
        parent = probe(other, prompts, n=n, name=flags.against, surprise=other.surprise, tolerated=flags.tolerate)
        usual = [sample.said.surprise for sample in parent.samples if sample.said.surprise is not None]
        health = probe(generator, prompts, n=n, name=flags.artifact, surprise=other.surprise, usual=usual, tolerated=flags.tolerate)
        verdicts = [health.verdict(), compare_health(health, parent)[1]]
    else:
        health = probe(generator, prompts, n=n, name=flags.artifact, tolerated=flags.tolerate)
        verdicts = [health.verdict()]
    facts = {"artifact": flags.artifact, "verdicts": [verdict.to_json() for verdict in verdicts], "health": as_json(health),
             "parent": None if parent is None else as_json(parent)}
    print(json.dumps(facts, indent=1) if flags.json else "\n".join([*malformed_lines(health), *map(str, verdicts)]))
    return 0 if overall(verdicts) is Outcome.PROVEN else 3


def run_history(flags: FLAGS, sampling: "Sampling") -> int:
    from assay.health.generation_probe import first_malformed, probe

    assert flags.history is not None
    folder = Path(flags.history) / "checkpoints"
    if not folder.is_dir():
        raise UsageError(f"{flags.history}: there is no folder `checkpoints` here, so this is not a run")
    probed: dict[str, Health] = {}
    names = sorted(child.name for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))

    def look(name: str) -> "Health":
        generator = load_generator(str(folder / name), flags, sampling, base=flags.base)
        prompts = prompts_for(flags, generator)
        probed[name] = probe(generator, prompts, n=rounds(flags, len(prompts)), name=name, tolerated=flags.tolerate)
        line_printer(json=flags.json)(f"{name}: {probed[name].sentence}")
        return probed[name]

    found = first_malformed(names, look)
    facts = {"history": flags.history, "first_bad": found.first_bad, "last_good": found.last_good, "sentence": found.sentence,
             "probed": {name: as_json(probed[name]) for name in names if name in probed}}
    print(json.dumps(facts, indent=1) if flags.json else found.sentence)
    return 0 if found.first_bad is None else 3


def generator_of(name: str, flags: FLAGS, sampling: "Sampling") -> "ModelGenerator | EndpointGenerator":
    from assay.health.generation_probe import open_endpoint

    if name.startswith(("http://", "https://")):
        return open_endpoint(name, sampling, model=flags.model, key=flags.key_env)
    return load_generator(name, flags, sampling, base=flags.base)


def load_generator(name: str, flags: FLAGS, sampling: "Sampling", base: str | None) -> "ModelGenerator":
    import torch

    from assay.evaluation.loaded_model import LoadedModel
    from assay.health.generation_probe import ModelGenerator
    from assay.store.artifact import open_artifact

    device = flags.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return ModelGenerator(LoadedModel(open_artifact(name, base=base), device=device), sampling)


def prompts_for(flags: FLAGS, generator: "ModelGenerator | EndpointGenerator") -> "tuple[ProbePrompt, ...]":
    """The user's prompts, else ours: questions for a model that answers, beginnings for one that continues."""
    from assay.health.generation_probe import ModelGenerator
    from assay.health.probe_prompts import BUILT_IN_PROMPTS, TEXT_BEGINNINGS, read_probe_prompts

    if flags.prompts is not None:
        return read_probe_prompts(flags.prompts)
    return TEXT_BEGINNINGS if isinstance(generator, ModelGenerator) and generator.raw else BUILT_IN_PROMPTS


def rounds(flags: FLAGS, prompts: int) -> int:
    from assay.health.generation_probe import HEALTHY_BOUND
    from assay.statistics.sequential import clean_samples_needed

    if flags.temperature == 0:
        return 1
    return flags.n if flags.n is not None else math.ceil(clean_samples_needed(HEALTHY_BOUND) / prompts)


def malformed_lines(health: "Health") -> list[str]:
    """One line a malformed sample."""
    return [f"  {sample.prompt.id:20} {sample.wrong.cause}: {sample.wrong.evidence}" for sample in health.samples if sample.wrong]


def as_json(health: "Health") -> dict[str, Any]:
    low, high = health.interval
    return {"name": health.name, "bad": health.bad, "n": len(health.samples), "low": low, "high": high, "causes": health.causes,
            "sentence": health.sentence, "samples": [sample.to_json() for sample in health.samples]}
