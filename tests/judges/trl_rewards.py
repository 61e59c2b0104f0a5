"""TRL's reward functions beside ours where both exist: the soft overlong penalty at every length, and boxed answers."""

from pathlib import Path

from assay.reward.reward_functions import built_in_reward, parse_rewards
from tests.judges.score import Score, packages

ASKS = "what reward does this completion get? (soft overlong penalty; answers in \\boxed{})"
GOLD = ("42", "-7", "1234", "0.5", "\\frac{1}{2}", "100")
SAID = ("42", "-7", "7", "1234", "1,234", "0.5", ".5", "\\frac{1}{2}", "\\frac12", "1/2", "0.50", "100", "100.0", "43", "x", "")


def judge(folder: Path) -> Score:
    score = Score(packages("trl", "math-verify"))
    lengths(score)
    boxed_answers(score)
    return score


def lengths(score: Score) -> None:
    from trl.rewards import get_soft_overlong_punishment

    for longest, margin in ((100, 20), (64, 64), (30, 1)):
        theirs = get_soft_overlong_punishment(max_completion_len=longest, soft_punish_cache=margin)
        ours = built_in_reward(parse_rewards([f"length[longest={longest},margin={margin}]:1"])[0])
        for length in range(longest + 20):
            [expected], found = theirs(completion_ids=[[1] * length]), ours("", "", {"completion_tokens": length})
            score.agree(abs(found - expected) < 1e-9, f"length {length} of {longest}, margin {margin}", f"{found}, TRL {expected}")


def boxed_answers(score: Score) -> None:
    from trl.rewards import accuracy_reward

    ours = built_in_reward(parse_rewards(["answer"])[0])
    for gold in GOLD:
        for said in SAID:
            text = f"Step by step. The answer is \\boxed{{{said}}}."
            [expected] = accuracy_reward([[{"content": text}]], [f"${gold}$"])
            found = ours("", text, {"answer": gold})
            if found < (expected or 0):
                score.refusals["a spelling that we do not take for the gold, and math-verify does"] += 1
            else:
                score.agree(found == (expected or 0), f"gold {gold}, said {said!r}", f"{found}, TRL {expected}")
