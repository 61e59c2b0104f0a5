"""Checks on what test-time training did: to the base, which is as it was; to the score, by document; to what is kept between documents."""

from collections.abc import Mapping, Sequence

import numpy as np

from assay.measure.estimate import Array, Estimate, ratio
from assay.measure.evidence import sign_flip_p
from assay.verdict import Verdict, proven, refuted, unproven

LEVEL = 0.95


def check_base(before: Mapping[str, str], after: Mapping[str, str]) -> Verdict:
    """Every tensor's sha256, before anything was read and once all was."""
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        return refuted("base", f"{len(changed)} of {len(before)} tensors of the model are not as they were: {', '.join(changed[:3])}",
                       changed=changed)
    return proven("base", f"all {len(before)} tensors of the model are as they were, bit for bit")


def gain(bits_with: Array, bits_without: Array, bytes_: Array) -> Estimate:
    """Bits per byte that were saved, over all bytes; its interval is over documents, each paired with itself."""
    return ratio(bits_without - bits_with, bytes_, level=LEVEL)


def check_gain(bits_with: Array, bits_without: Array, bytes_: Array) -> Verdict:
    """Shown where the interval leaves out 0 and so does an exact test: were there no gain, each document would be as likely to lose."""
    found, p = gain(bits_with, bits_without, bytes_), sign_flip_p(bits_without - bits_with)
    words = f"{found} bits per byte saved, sign flips p = {p:.2g}"
    shown = p <= 1 - LEVEL
    if shown and found.low > 0:
        return proven("gain", f"test-time training helps: {words}", gain=found.mean, p=p)
    if shown and found.high < 0:
        return refuted("gain", f"test-time training hurts: {words}; lower --lr or --steps", gain=found.mean, p=p)
    return unproven("gain", f"not shown, either way: {words}; read more documents", gain=found.mean, p=p)


def check_regressions(bits_with: Array, bits_without: Array, names: Sequence[str], bound: float) -> Verdict:
    """No document costs more than (1 + bound) times what it costs the model alone: a mean can hide a document that collapsed."""
    lost = bits_with / bits_without - 1
    worse, worst = int((lost > 0).sum()), int(lost.argmax())
    words = f"{worse} of {len(names)} documents got worse"
    if worse:
        words += f", {names[worst]} most: {bits_without[worst]:.0f} bits became {bits_with[worst]:.0f} ({lost[worst]:+.2%})"
    evidence = {"worse": worse, "worst": names[worst], "lost": float(lost[worst])}
    if not lost[worst] <= bound:
        return refuted("regressions", f"{words}; allowed is {bound:.1%}", **evidence)
    return proven("regressions", f"{words}; allowed is {bound:.1%}", **evidence)


def check_drift(norms: Sequence[float], bound: float) -> Verdict:
    """Right factors that are kept from document to document stay of the size they began with. `norms` are relative to the first."""
    values = np.asarray(norms, dtype=np.float64)
    if not values.size:
        return unproven("drift", "no document began with kept factors; read more documents than there are slots")
    words = (f"the right factors that {values.size} documents were handed had {values.min():.3g} to {values.max():.3g} times the norm of "
             f"the first, {values[-1]:.3g} in the end")
    if not ((values >= 1 / bound) & (values <= bound)).all():  # so said, that what is no number is not within
        return refuted("drift", f"{words}; allowed is {1 / bound:.3g} to {bound:.3g}: they run away or die out, so that a seed or a longer "
                       "text can end elsewhere. Change --weight-decay or --lr, or leave out --warm-start", norms=list(map(str, norms)))
    return proven("drift", f"{words}; allowed is {1 / bound:.3g} to {bound:.3g}", low=float(values.min()), high=float(values.max()))
