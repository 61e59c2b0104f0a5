"""Plan refusals: what a run would refuse by its options and its model's headers alone, its plan refuses in the same words."""

from dataclasses import replace
from pathlib import Path

from assay.model.families import scaled_context
from assay.recipes.compute_dtype import refuse_bf16_masters, refuse_fp16
from assay.recipes.conversations import refuse_nonsense
from assay.recipes.distill import refuse_unclear_distill
from assay.recipes.dpo_options import Dpo
from assay.recipes.feedback_data import kto_settings
from assay.recipes.grpo import refuse_unclear_grpo
from assay.recipes.grpo_options import Grpo
from assay.recipes.kto_options import Kto
from assay.recipes.memory_plan import PlannedModel
from assay.recipes.options import Distill, Pretrain, Tuned
from assay.recipes.preference_data import refuse_idle_reference, settings_of
from assay.recipes.pretrain import refuse_unclear_pretrain
from assay.recipes.processes import refuse_unclear_parts
from assay.recipes.starting_model import refuse_base_dtype, refuse_lora_options, refuse_unclear_start


def refuse_unclear_options(config: Tuned | Grpo | Pretrain) -> None:
    """Refuse unclear options before anything is read."""
    refuse_unclear_parts(config)
    if isinstance(config, Pretrain):
        unasked = config.minutes is None and config.tokens is None  # a budget changes nothing of what is planned
        refuse_unclear_pretrain(replace(config, tokens=1) if unasked else config)
        return
    if isinstance(config, Grpo):
        refuse_unclear_grpo(config)
    else:
        refuse_nonsense(config)
    if isinstance(config, Distill):
        refuse_unclear_distill(config)
    if isinstance(config, Dpo):
        refuse_idle_reference(config, settings_of(config))
    if isinstance(config, Kto):
        kto_settings(config)
    if not (isinstance(config, Distill) and config.student_layers is not None):
        refuse_unclear_start(config)


def refuse_for_model(config: Tuned | Grpo | Pretrain, model: PlannedModel) -> None:
    """Given the model's config and, where it is an adapter, what it says of itself."""
    refuse_fp16(config, model.config)
    if isinstance(config, Pretrain):
        return
    adapter = model.rank > 0
    refuse_base_dtype(config)
    refuse_bf16_masters(config, adapter=adapter or config.lora_r > 0)
    refuse_lora_options(config, Path(str(config.from_ or config.model)), model.rank if adapter else None, rslora=model.rslora)
    if config.rope_scaling is not None:
        scaled_context(model.config, config.rope_scaling)
