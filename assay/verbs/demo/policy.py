"""Reinforcement: exact answers are rewarded, and what that was worth is measured, compared and probed beside the parent."""

from pathlib import Path

from assay.verbs.demo.stage import called
from assay.verbs.demo.tuning import last_checkpoint, write

REINFORCE = ["--reward", "answer:1", "--prompts", "16", "--group", "8", "--max-new", "8", "--steps", "12", "--epochs", "50", "--lr", "2e-4",
             "--warmup", "0", "--checkpoint-every", "12", "--held-out", "0.3", "--look-prompts", "30", "--eval-samples", "8",
             "--reward-workers", "1", "--device", "cpu"]
EVALUATE = ["--task", "graded", "--grader", "answer", "--raw", "-k", "4", "--temperature", "1", "--max-new", "8", "--device", "cpu"]


def reinforced(folder: Path) -> list[str]:
    """Names of what did not hold."""
    parent, sums = last_checkpoint(folder / "sft"), ["--data", str(folder / "sums.jsonl")]
    if called("grpo", "--from", str(parent), "--optimizer-state", "fresh", *sums, "--out", str(folder / "grpo"), *REINFORCE):
        return ["reinforcement"]
    return []


def measured(folder: Path) -> list[str]:
    """Parent and child on the same sums. What a probe says of such a small model is shown, not demanded."""
    models = {name: str(folder / name / "model") for name in ("sft", "grpo")}
    evals = {name: str(folder / "evals" / name) for name in models}
    failed = [f"the evaluation of {name}" for name, model in models.items()
              if called("eval", model, "--data", str(folder / "sums.jsonl"), "--out", evals[name], *EVALUATE)]
    if failed or called("compare", *evals.values(), "--require", "better"):
        return [*failed, "the comparison"]
    prompts = write(folder / "prompts.jsonl", [{"prompt": f"{a}+{b}="} for a, b in ((1, 2), (3, 4), (5, 5), (8, 1))])
    called("probe", models["grpo"], "--against", models["sft"], "--prompts", str(prompts), "-n", "4", "--max-new", "8", "--device", "cpu")
    print("   a model this small knows sums and nothing else: the probe says so, and that the child is not shown worse than its parent")
    return []


def told(folder: Path) -> list[str]:
    """One page for the run, and a table of all of them."""
    failed = ["the report"] if called("report", str(folder / "grpo")) else []
    return [*failed, "the table of runs"] if called("runs", str(folder)) else failed
