"""Sightings of faults, in the tests: faults of one job have one clean twin, which is run once in a process."""

import functools

from assay.testing.fault_injection import Fault, Sighting, observe, run_clean

clean_twin = functools.cache(run_clean)


def sight(fault: Fault) -> Sighting:
    return observe(fault, clean_twin)
