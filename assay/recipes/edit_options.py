"""The options of editing, apart from the recipe itself, so that `--help` loads no torch."""

from dataclasses import dataclass
from typing import Literal

from assay.config import argument, option


@dataclass(frozen=True)
class Edit:
    """Write new facts into a model's weights, and measure on the reloaded bytes what they did: to the facts, their paraphrases,
    their neighbours and plain text. The edited model is a checkpoint in OUT/model, proven against its parent."""

    path: str = argument("checkpoint, Hugging Face folder, GGUF file or fetched name")
    facts: str = option("CounterFact (original or EasyEdit layout), or rows of prompt, subject and target; .json or .jsonl")
    text: str = option("plain text in the model's language: for second moments, and another part of it for the drift of perplexity")
    out: str = option("folder of the run")
    method: Literal["memit", "rome", "alphaedit"] = option("all facts at once; one by one; or in the text's null space", default="memit")
    layers: str = option("which layers to edit, as 3-8 or 3,5,7; auto: found by causal tracing", default="auto")
    window: int | None = option("how many layers auto chooses (a sixth of the model's; rome: 1)", least=1, default=None)
    known: int | None = option("take the first so many facts whose old answer the model gives by itself", least=1, default=None)
    first: int | None = option("take the first so many facts", least=1, default=None)
    moment_tokens: int = option("tokens of text for the second moments", least=1, default=50_000)
    drift_tokens: int = option("tokens of text for the drift of perplexity", least=1, default=8192)
    weight: float = option("memit: how much the text's keys count against the new facts", above=0, default=2000.0)
    null_share: float = option("alphaedit: the null space holds at most this share of the text's keys", least=0, most=1, default=0.02)
    ridge: float = option("alphaedit: relative to the projected keys", least=0, default=0.01)
    prefixes: int = option("texts, made up by the model, in front of which a fact must hold as well", least=0, default=5)
    prefix_tokens: int = option("tokens of each", least=1, default=10)
    steps: int = option("of the search for a target", least=1, default=25)
    lr: float = option("of that search", above=0, default=0.5)
    kl: float = option("weight of the subject's essence in it", least=0, default=0.0625)
    decay: float = option("weight of the target's distance in it", least=0, default=0.5)
    clamp: float = option("most that a target may be away, in lengths of the state", above=0, default=0.75)
    trace_facts: int = option("facts that auto traces", least=1, default=4)
    trace_samples: int = option("noises per fact", least=1, default=2)
    probe_rounds: int = option("texts of each prompt that has nothing to do with the facts, before and after", least=0, default=2)
    max_update: float = option("most that one matrix may move, as a share of itself", above=0, default=0.5)
    goal_efficacy: float = option("share of facts whose target must be likelier than the old answer", least=0, most=1, default=0.95)
    goal_generated: float = option("share of facts whose target must be what the model says", least=0, most=1, default=0.8)
    goal_drift: float = option("most that the perplexity of text may grow, as a share", least=0, default=0.02)
    probe_samples: int = option("texts to each of eight prompts by which a proof may judge what a checkpoint says; clean ones are enough "
                                "after one; 0: none", least=0, default=4)
    seed: int = option("seed", default=0)
    device: str | None = option("cpu or cuda (cuda where there is one)", default=None)
    json: bool = option("print verdicts and estimates as JSON", default=False)
