"""assay seeds: a recipe once per seed, and one verdict on all of them."""

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from assay.config import argument, option, parse, passed_on
from assay.errors import UsageError
from assay.recipes.options import Pretrain
from assay.verdict import Outcome, overall

if TYPE_CHECKING:
    from assay.recipes.seeds import Plan


@dataclass(frozen=True)
class FLAGS:
    """Run a recipe once per seed, one after another or one on each GPU, and judge what the seeds show together: the mean with
    its interval, the worst seed, a collapse or two modes, where a collapsing seed left the others, and how much a clean
    result excludes. Every option that is not listed here is the recipe's own and is passed on to it. A seed that finished is
    not run again; one that was interrupted goes on where it stopped."""

    recipe: Literal["pretrain"] = argument("the recipe; its options may follow")
    seeds: tuple[int, ...] = option("two or more")
    out: str = option("folder: a run per seed, and seeds.json")
    json: bool = option("print seeds.json", default=False)
    options: tuple[str, ...] = passed_on()


EXAMPLES = """  assay seeds pretrain --corpus corpus --depth 6 --minutes 5 --seeds 42 314 1337 --out runs/three
  assay seeds pretrain --config run.yaml --seeds 1 2 3 4 5 --out runs/five --json"""
RECIPES = {"pretrain": Pretrain}


def run(flags: FLAGS) -> int:
    from assay.recipes.seeds import run_seeds

    out = sys.stderr if flags.json else sys.stdout
    found = run_seeds(checked(flags), lambda text: print(text, file=out, flush=True))
    if found.interrupted is not None:
        return 128 + found.interrupted
    print(json.dumps(found.document, indent=1) if flags.json else "\n".join(f"  {verdict}" for verdict in found.verdicts))
    return 0 if overall(found.verdicts) is Outcome.PROVEN else 3


def checked(flags: FLAGS) -> "Plan":
    """The recipe reads its options here and now: a mistake is found before the first seed is paid for."""
    from assay.recipes.seeds import Plan

    if len(set(flags.seeds)) != len(flags.seeds) or len(flags.seeds) < 2:
        raise UsageError(f"--seeds {' '.join(map(str, flags.seeds))}: expected two or more different seeds; one shows nothing "
                         "of how seeds differ")
    if taken := [word for word in flags.options if word.partition("=")[0] == "--seed"]:
        raise UsageError(f"{taken[0]}: each seed of --seeds is given to the recipe; leave it out")
    argv = [*flags.options, "--seed", str(flags.seeds[0]), "--out", flags.out]
    config = parse(RECIPES[flags.recipe], argv, prog=f"assay {flags.recipe}", config_file=True)
    return Plan(flags.recipe, flags.options, flags.seeds, flags.out, config.device)
