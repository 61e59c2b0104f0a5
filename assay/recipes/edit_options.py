"""Options of model editing, apart from the recipe itself, so that `--help` loads no torch."""

from dataclasses import dataclass
from typing import Literal

from assay.config import argument, option
from assay.recipes.options import DEVICE, PROBE_SAMPLES_HELP, QUIET_HELP


@dataclass(frozen=True)
class Edit:
    """Write new facts into a model's weights, and measure the effect on the reloaded model: on the facts, their paraphrases, related
    subjects and plain text. The edited model is a checkpoint in OUT/model, proven against its parent."""

    path: str = argument("checkpoint, Hugging Face folder, GGUF file or fetched name")
    facts: str = option("CounterFact (original or EasyEdit layout), or rows of prompt, subject and target; .json or .jsonl", group="data",
                        metavar="FILE")
    text: str = option("plain text in the model's language: one part for the second moments, another to measure the change of perplexity",
                       group="data", metavar="FILE")
    out: str = option("folder of the run", group="run", metavar="FOLDER")
    method: Literal["memit", "rome", "alphaedit", "tune"] = option(
        "MEMIT: all facts at once; ROME: one by one; AlphaEdit: in the null space of the text; tune: train the same matrices while "
        "answers to text and other questions are preserved", group="method",
        default="memit")
    layers: str = option("layers to edit, as 3-8 or 3,5,7; auto finds them by causal tracing", group="method", default="auto")
    window: int | None = option("how many layers to choose", needs="--layers auto", group="method", least=1, default=None,
                                default_text="a sixth of the model's, 1 with rome")
    known: int | None = option("take the first N facts whose old answer the unedited model gives", group="data", least=1,
                               default=None, default_text="all facts, known or not")
    first: int | None = option("take the first N facts", group="data", least=1, default=None, default_text="all")
    moment_tokens: int = option("tokens of text for the second moments", group="data", least=1, default=50_000)
    drift_tokens: int = option("tokens of text on which the change of perplexity is measured", group="evaluation", least=1, default=8192)
    mom2_update_weight: float = option("with memit: weight of the text's keys against the new facts", group="method", above=0,
                                       default=2000.0)
    null_share: float = option("with alphaedit: the most of the text's keys, as a share, that the null space may hold",
                               group="method", least=0,
                               most=1, default=0.02)
    ridge: float = option("with alphaedit: ridge term of the solution, relative to the projected keys",
                          group="method", least=0, default=0.01)
    prefixes: int = option("number of texts, sampled from the model, that are put before a fact's prompt, so that the fact holds after "
                           "them too", group="method", least=0, default=5)
    prefix_tokens: int = option("tokens of each of these prefixes", group="method", least=1, default=10)
    rephrasings: int = option("number of other wordings of each fact's question, besides its row's `rephrasings`, in which its target is "
                              "optimised too: taken from questions of the file about the same relation, never one in which a fact is "
                              "evaluated",
                              group="method", least=0, default=0)
    keys: Literal["mean", "each"] = option("what represents a fact in the solve: the mean of its keys over all contexts (mean), or each "
                                           "of them (each)",
                                           group="method", default="mean")
    v_num_grad_steps: int = option("gradient steps of the optimisation of a fact's target state", group="method", least=1, default=25)
    v_lr: float = option("learning rate of that optimisation", group="method", above=0, default=0.5)
    kl_factor: float = option("weight in that optimisation of the KL that keeps what the model otherwise says of the subject",
                              group="method", least=0,
                              default=0.0625)
    v_weight_decay: float = option("weight in that optimisation of the target's distance from the original state",
                                   group="method", least=0, default=0.5)
    clamp_norm_factor: float = option("the largest distance of a target from the original state, relative to that state's norm",
                                      group="method", above=0, default=0.75)
    tune_steps: int = option("with tune: training steps", group="method", least=1, default=200)
    tune_lr: float = option("with tune: learning rate", group="method", above=0, default=3e-4)
    tune_hold: float = option("with tune: weight of the KL that preserves the model's answers on text and on bystanders",
                              group="method", least=0, default=4.0)
    bystanders: int = option("with tune: number of questions of the file about other subjects, whose answers are preserved",
                             group="method", least=0,
                             default=2000)
    trace_facts: int = option("number of facts to trace", needs="--layers auto", group="method", least=1, default=4)
    trace_samples: int = option("noise samples for each fact", needs="--layers auto", group="method", least=1, default=2)
    probe_rounds: int = option("texts sampled before and after the edit for each prompt that is unrelated to the facts",
                               group="evaluation", least=1,
                               default=2)
    max_update: float = option("the largest change of one matrix, relative to its norm", group="method", above=0, default=0.5)
    goal_efficacy: float = option("goal: share of facts whose new answer is likelier than the old one", group="evaluation", least=0, most=1,
                                  default=0.95)
    goal_generated: float = option("goal: share of facts whose new answer the model generates", group="evaluation", least=0, most=1,
                                   default=0.8)
    goal_drift: float = option("goal: the largest increase of perplexity on text, as a share", group="evaluation", least=0, default=0.02)
    probe_samples: int = option(PROBE_SAMPLES_HELP, group="checkpoints", least=0, default=4)
    seed: int = option("seed of the prefixes and of the tracing noise", group="run", default=0)
    device: str | None = option("where to compute: cpu or cuda", group="run", default=None,
                                default_text=DEVICE)
    quiet: bool = option(QUIET_HELP, group="run", default=False)
    json: bool = option("print verdicts and estimates as JSON", group="run", default=False)
