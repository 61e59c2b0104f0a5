"""Zoo of silent failures: each fault can be planted on demand, with the check that must catch it."""

from assay.testing.fault_injection import FAULTS, Fault, Sighting, observe

__all__ = ["Fault", "Sighting", "catalogue", "observe"]


def catalogue() -> dict[str, Fault]:
    """Every fault, registered on first use: importing the zoo plants nothing and loads no model."""
    from assay.zoo import (  # noqa: F401 - importing registers
        adapter_faults,
        agent_faults,
        chat_faults,
        checkpoint_faults,
        conclusion_faults,
        corpus_faults,
        distillation_faults,
        editing_faults,
        evaluation_faults,
        file_format_faults,
        forward_faults,
        method_faults,
        number_format_faults,
        preference_faults,
        publication_faults,
        remote_faults,
        reward_faults,
        rollout_faults,
        row_file_faults,
        run_faults,
        served_policy_faults,
        server_faults,
        sharding_faults,
        speech_faults,
        staleness_faults,
        training_faults,
        ttt_faults,
        witness_faults,
    )

    return FAULTS
