"""Average checks: sound averages of many steps are silent; each way to keep another one is refuted."""

import pytest
import torch

from assay.guard.average_checks import FollowedAverage
from assay.learn.ema import Ema
from assay.verdict import Outcome


def followed(decay=0.9, steps=6, start=0, moved=0.01, wrong=None):
    """Verdict on an average of weights that `moved` at every step; `wrong(ema, step)` keeps it instead of `Ema.update`."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(20)))
    ema = Ema(model, decay)
    check = FollowedAverage(ema.averaged(), ema.tensors(), decay)
    for step in range(start, start + steps):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += moved * torch.randn_like(parameter)
        (wrong or Ema.update)(ema, step)
        check.update(step)
    return check.check()


@pytest.mark.parametrize("how", [{}, {"steps": 1}, {"start": 500, "decay": 0.999}, {"steps": 3000, "decay": 0.999, "moved": 1e-4},
                                 {"steps": 3000, "decay": 0.9999, "moved": 1e-7}, {"moved": 10.0}])
def test_a_sound_average_is_silent(how):
    assert followed(**how).outcome is Outcome.PROVEN


def late(ema, step):
    Ema.update(ema, step + 1)


def always_its_decay(ema, step):
    torch._foreach_lerp_([*ema.tensors().values()], [*ema.averaged().values()], 1 - ema.decay)


def no_number(ema, step):
    Ema.update(ema, step)
    ema.tensors()["ema/7.weight"].fill_(torch.nan)


@pytest.mark.parametrize("wrong", [late, always_its_decay, no_number, lambda ema, step: None,
                                   lambda ema, step: step == 3 or Ema.update(ema, step)])
def test_another_average_is_refuted(wrong):
    found = followed(wrong=wrong)
    assert found.outcome is Outcome.REFUTED
    assert found.check == "average"
