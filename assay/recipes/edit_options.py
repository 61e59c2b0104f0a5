"""Options of model editing, apart from the recipe itself, so that `--help` loads no torch."""

from dataclasses import dataclass
from typing import Literal

from assay.config import argument, option
from assay.recipes.options import QUIET_HELP


@dataclass(frozen=True)
class Edit:
    """Write new facts into a model's weights, and measure on the reloaded bytes what they did: to the facts, their paraphrases,
    their neighbours and plain text. The edited model is a checkpoint in OUT/model, proven against its parent."""

    path: str = argument("checkpoint, Hugging Face folder, GGUF file or fetched name")
    facts: str = option("CounterFact (original or EasyEdit layout), or rows of prompt, subject and target; .json or .jsonl", group="data",
                        metavar="FILE")
    text: str = option("plain text in the model's language: for second moments, and another part of it for the drift of perplexity",
                       group="data", metavar="FILE")
    out: str = option("folder of the run", group="run", metavar="FOLDER")
    method: Literal["memit", "rome", "alphaedit", "tune"] = option(
        "all facts at once; one by one; in the text's null space; or trained, with text and other questions held", group="method",
        default="memit")
    layers: str = option("which layers to edit, as 3-8 or 3,5,7; auto: found by causal tracing", group="method", default="auto")
    window: int | None = option("with --layers auto: how many layers are chosen", group="method", least=1, default=None,
                                default_text="a sixth of the model's, 1 with rome")
    known: int | None = option("take the first so many facts whose old answer the model gives by itself", group="data", least=1,
                               default=None, default_text="all facts, known or not")
    first: int | None = option("take the first so many facts", group="data", least=1, default=None, default_text="all")
    moment_tokens: int = option("tokens of text for the second moments", group="data", least=1, default=50_000)
    drift_tokens: int = option("tokens of text for the drift of perplexity", group="evaluation", least=1, default=8192)
    mom2_update_weight: float = option("with memit: how much the text's keys count against the new facts", group="method", above=0,
                                       default=2000.0)
    null_share: float = option("with alphaedit: the null space holds at most this share of the text's keys", group="method", least=0,
                               most=1, default=0.02)
    ridge: float = option("with alphaedit: ridge of the solution, relative to the projected keys", group="method", least=0, default=0.01)
    prefixes: int = option("texts, made up by the model, in front of which a fact must hold as well", group="method", least=0, default=5)
    prefix_tokens: int = option("tokens of each of these texts", group="method", least=1, default=10)
    rephrasings: int = option("other wordings of each fact's question in which its target is sought too, besides its row's `rephrasings`: "
                              "those in which the file asks others of its relation, never one in which a fact is evaluated",
                              group="method", least=0, default=0)
    keys: Literal["mean", "each"] = option("what stands for a fact in the solve: the mean of its keys over all contexts, or each of them",
                                           group="method", default="mean")
    v_num_grad_steps: int = option("gradient steps of the search for a fact's target state", group="method", least=1, default=25)
    v_lr: float = option("learning rate of that search", group="method", above=0, default=0.5)
    kl_factor: float = option("weight in that search of what the model says of the subject otherwise", group="method", least=0,
                              default=0.0625)
    v_weight_decay: float = option("weight in that search of the target's distance from the state", group="method", least=0, default=0.5)
    clamp_norm_factor: float = option("the most that a target may be away, in lengths of the state", group="method", above=0, default=0.75)
    tune_steps: int = option("with tune: steps of training", group="method", least=1, default=200)
    tune_lr: float = option("with tune: learning rate", group="method", above=0, default=3e-4)
    tune_hold: float = option("with tune: weight of what the model said of text and of bystanders", group="method", least=0, default=4.0)
    bystanders: int = option("with tune: questions of the file about others, whose answers are held", group="method", least=0,
                             default=2000)
    trace_facts: int = option("with --layers auto: facts that are traced", group="method", least=1, default=4)
    trace_samples: int = option("with --layers auto: noises per fact", group="method", least=1, default=2)
    probe_rounds: int = option("texts to each prompt that has nothing to do with the facts, before and after", group="evaluation", least=1,
                               default=2)
    max_update: float = option("the most that one matrix may move, as a share of itself", group="method", above=0, default=0.5)
    goal_efficacy: float = option("share of facts whose target must be likelier than the old answer", group="evaluation", least=0, most=1,
                                  default=0.95)
    goal_generated: float = option("share of facts whose target must be what the model says", group="evaluation", least=0, most=1,
                                   default=0.8)
    goal_drift: float = option("the most that the perplexity of text may grow, as a share", group="evaluation", least=0, default=0.02)
    probe_samples: int = option("texts to each of eight prompts by which a proof may judge what a checkpoint says; where the first of each "
                                "are clean, they are enough; 0: none", group="checkpoints", least=0, default=4)
    seed: int = option("seed of the prefixes and of the noise", group="run", default=0)
    device: str | None = option("where to compute: cpu or cuda", group="run", default=None,
                                default_text="a GPU where there is one, else cpu")
    quiet: bool = option(QUIET_HELP, group="run", default=False)
    json: bool = option("print verdicts and estimates as JSON", group="run", default=False)
