"""Initial weights: fresh draws, as wide as documented, each matrix its own."""

from assay.guard.training_guards import check_initial_weights
from assay.model.transformer import initialised
from assay.testing.tiny_models import tiny_config
from assay.verdict import Outcome


def test_fresh_matrices_are_draws_of_their_own_and_as_wide_as_documented():
    model = initialised(tiny_config(), 0)
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert check_initial_weights(parameters, model.config.depth).outcome is Outcome.PROVEN
    wide = parameters | {"blocks.0.mlp.down.weight": parameters["blocks.0.mlp.down.weight"] * 2}
    twins = parameters | {"blocks.1.attn.qkv.weight": parameters["blocks.0.attn.qkv.weight"]}
    assert [check_initial_weights(wrong, model.config.depth).outcome for wrong in (wide, twins)] == [Outcome.REFUTED] * 2
