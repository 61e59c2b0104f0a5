"""Options of a reward model: which pairs it learns to tell apart, and how its rewards are kept about 0."""

from dataclasses import dataclass
from typing import ClassVar

from assay.config import option
from assay.recipes.dpo_options import PairedOptions
from assay.recipes.options import ByForm

REWARD_RATES = ByForm(whole=1e-5, adapter=1e-4)


@dataclass(frozen=True, kw_only=True)
class RewardModel(PairedOptions):
    """Train a reward model on preference pairs (Bradley–Terry). The same command resumes an interrupted run in --out.

    The reward is the logit of the token <|reward|> at the end of a text. assay grpo --reward model:PATH uses the final model.
    """

    RATES: ClassVar[ByForm] = REWARD_RATES

    data: tuple[str, ...] = option("pairs: .jsonl(.gz), .parquet or .csv with prompt, chosen and rejected, as in assay dpo; several files "
                                   "are read as one or, where each has its share of the rows (a.jsonl:0.7 b.jsonl:0.3), as a mixture",
                                   group="data", metavar="FILE")
    learning_rate: float | None = option("peak learning rate", group="optimizer", above=0, default=None,
                                         default_text=f"{REWARD_RATES.whole:g}")
    center_rewards_coefficient: float = option("weight of (chosen + rejected)², which keeps rewards close to 0; TRL suggests 0.01",
                                               group="method", least=0, default=0.0)
    probe_samples: int = option("texts sampled by a proof to judge whether a checkpoint's text is degenerate; a reward model is not meant "
                                "to write",
                                group="checkpoints", least=0, default=0)
