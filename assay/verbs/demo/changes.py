"""Changes to weights: facts are edited and traced to their layers, and a text is read by a model that learns while it reads."""

import json
from pathlib import Path

from assay.verbs.demo.stage import called

EDIT = ["--layers", "0-1", "--lr", "0.1", "--clamp", "1", "--steps", "60", "--kl", "0", "--weight", "10", "--max-update", "10",
        "--prefixes", "3", "--prefix-tokens", "8", "--drift-tokens", "1000", "--goal-drift", "1", "--device", "cpu"]
READ = ["--chunk", "24", "--context", "72", "--rank", "2", "--lr", "1e-2", "--batch", "4", "--device", "cpu"]


def edited(folder: Path) -> list[str]:
    """Names of what did not hold. The model knows a few made-up facts; where two people live is changed."""
    from assay.model.stops import resolve_stops
    from assay.store import checkpoint
    from assay.store.pack import Lineage, model_contents
    from assay.zoo import lore

    tokenizer, facts = lore.lore_tokenizer(), lore.edits(2)
    contents = model_contents(lore.lore_model(), tokenizer, resolve_stops(tokenizer, {}, {}), Lineage())
    before = checkpoint.write(folder / "lore", contents).folder
    rows = [{"prompt": fact.prompt, "subject": fact.subject, "target": fact.target, "old": fact.old, "paraphrases": list(fact.paraphrases),
             "neighbourhood": [{"prompt": near.prompt, "answer": near.answer} for near in fact.neighbourhood]} for fact in facts]
    (folder / "facts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = ["--facts", str(folder / "facts.jsonl"), "--text", str(lore.write_text(folder / "lore.txt")), "--out", str(folder / "edit")]
    if called("edit", str(before), *files, *EDIT):
        return ["the edit"]
    prompt = facts[0].prompt.replace("{}", facts[0].subject)
    called("trace", str(before), str(folder / "edit" / "model"), "--prompt", prompt)  # they part, which its exit code says
    return ["the difference"] if called("diff", str(before), str(folder / "edit" / "model")) else []


def read_and_learned(base: Path, folder: Path) -> list[str]:
    from assay.zoo.passing import chants

    (folder / "chants.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in chants(10)))
    words = [str(base), "--text", str(folder / "chants.jsonl"), "--out", str(folder / "ttt"), *READ]
    return ["test-time training"] if called("ttt", *words) else []
