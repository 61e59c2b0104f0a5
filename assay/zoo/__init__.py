"""What can go wrong, on demand: each fault with the check that must catch it."""

from assay.zoo.fault import FAULTS, Fault, Sighting, observe

__all__ = ["Fault", "Sighting", "catalogue", "observe"]


def catalogue() -> dict[str, Fault]:
    """Every fault, registered on first use: importing the zoo plants nothing and loads no model."""
    from assay.zoo import (  # noqa: F401 - importing registers
        adapters,
        checkpoints,
        conversations,
        corpora,
        distilling,
        editing,
        evaluating,
        formats,
        forward,
        measuring,
        passing,
        policy,
        resuming,
        rewarding,
        serving,
        speaking,
        training,
        tuning,
        verdicts,
    )

    return FAULTS
