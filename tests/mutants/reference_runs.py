"""Reference runs: the shortest commands that reach the code that makes results, each with its real proof; and what they start from."""

import json
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.forked_runs import ForkedRun


@dataclass(frozen=True)
class ReferenceRun:
    """`needs` are fixtures that are copied beside it; `said` is true where the result is what is printed; `module` is what is run."""

    name: str
    words: tuple[str, ...]
    needs: tuple[str, ...]
    said: bool = False
    module: str = "assay"

    def forked(self, folder: Path, code: Path, seconds: float, coverage: Path | None = None) -> ForkedRun:
        return ForkedRun(self.words, folder, code, seconds, coverage, self.module)


TUNE = ("--max-length", "32", "--batch-tokens", "128", "--micro-batch-tokens", "64", "--max-steps", "3", "--learning-rate", "3e-3",
        "--warmup-steps", "1", "--held-out", "0.1", "--save-steps", "1000", "--probe-samples", "1", "--device", "cpu")
GRPO = ("--reward", "answer:1", "--prompts", "4", "--num-generations", "4", "--max-completion-length", "8", "--num-train-epochs", "50",
        "--max-steps", "2", "--learning-rate", "2e-4", "--warmup-steps", "0", "--save-steps", "1000", "--held-out", "0.3",
        "--eval-prompts", "8", "--micro-batch-size", "8", "--reward-workers", "1", "--probe-samples", "1", "--device", "cpu")
EDIT = ("--layers", "0-1", "--v-lr", "0.1", "--clamp-norm-factor", "1", "--v-num-grad-steps", "40", "--kl-factor", "0.01",
        "--mom2-update-weight", "10", "--max-update", "10", "--prefixes", "2", "--prefix-tokens", "6", "--moment-tokens", "1500",
        "--drift-tokens", "500", "--goal-drift", "1", "--probe-rounds", "1", "--probe-samples", "1", "--device", "cpu")
PAIRS = ("--max-length", "32", "--batch-tokens", "512", "--micro-batch-tokens", "256", "--max-steps", "3", "--learning-rate", "3e-3",
         "--warmup-steps", "0", "--num-train-epochs", "50", "--held-out", "0.3", "--save-steps", "1000", "--probe-samples", "1", "--device",
         "cpu")
EPISODES = ("--environment", "assay.testing.echo_environment:Echo", "--tasks", "24", "--held-out", "0.3", "--prompts", "3",
            "--num-generations", "4", "--max-completion-length", "6", "--max-turns", "3", "--max-steps", "2", "--num-train-epochs", "50",
            "--learning-rate", "2e-4", "--warmup-steps", "0", "--save-steps", "1000", "--eval-prompts", "2", "--micro-batch-size", "8",
            "--reward-workers", "1", "--probe-samples", "1", "--device", "cpu")
TOOLS = ("--environment", "calculator", "--environment-options", "terse=true", "--tasks", "24", "--held-out", "0.3", "--prompts", "2",
         "--num-generations", "3", "--max-completion-length", "100", "--max-turns", "2", "--max-steps", "2", "--num-train-epochs", "50",
         "--learning-rate", "2e-4", "--warmup-steps", "0", "--save-steps", "1000", "--eval-prompts", "2", "--micro-batch-size", "8",
         "--reward-workers", "1", "--probe-samples", "1", "--device", "cpu")
CALLS = {  # how a chat template writes them, in two formats
    "hermes": "<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>",
    "qwen3_coder": "<tool_call><function={{ call.function.name }}>{% for key, value in call.function.arguments.items() %}"
                   "<parameter={{ key }}>{{ value }}</parameter>{% endfor %}</function></tool_call>"}
EVAL = ("--data", "sums.jsonl", "--task", "graded", "--grader", "answer", "--raw", "-k", "2", "--temperature", "1", "--max-new-tokens", "6",
        "--limit", "24", "--device", "cpu")

PRETRAIN = ("--depth", "1", "--tokens", "1024", "--max-length", "16", "--batch-tokens", "256", "--micro-batch-tokens", "128",
            "--warmup-steps", "1", "--eval-documents", "4", "--probe-samples", "1", "--device", "cpu")
TOGETHER = ("--gpus", "2", "--process-timeout", "15")
SHARDS = (*TOGETHER, "--shards", "3")
FSDP = (*TOGETHER, "--fsdp")
SERVED = "tests.mutants.served_runs"

REFERENCE_RUNS = (
    ReferenceRun("sft", ("sft", "--model", "base", "--data", "learned.jsonl", "--out", "run", *TUNE), ("base", "learned.jsonl")),
    ReferenceRun("lora", ("sft", "--model", "base", "--data", "chats.jsonl", "--out", "run", "--lora-r", "2", *TUNE),
                 ("base", "chats.jsonl")),
    ReferenceRun("resume", ("sft", "--model", "base", "--data", "learned.jsonl", "--out", "run", *TUNE), ("base", "learned.jsonl", "run")),
    ReferenceRun("pretrain", ("pretrain", "--corpus", "corpus", "--out", "run", *PRETRAIN), ("corpus",)),
    ReferenceRun("distill", ("distill", "--teacher", "taught", "--model", "base", "--data", "learned.jsonl", "--out", "run", "--ce-weight",
                             "0.3", "--divergence", "jsd", *TUNE), ("base", "taught", "learned.jsonl")),
    ReferenceRun("distill-stored", ("distill", "--teacher", "taught", "--model", "base", "--data", "learned.jsonl", "--out", "run", "--how",
                                    "stored", "--teacher-top-k", "8", *TUNE), ("base", "taught", "learned.jsonl")),
    ReferenceRun("grpo", ("grpo", "--model", "taught", "--data", "sums.jsonl", "--out", "run", *GRPO), ("taught", "sums.jsonl")),
    ReferenceRun("eval", ("eval", "taught", "--out", "scores", *EVAL), ("taught", "sums.jsonl")),
    ReferenceRun("edit", ("edit", "lore", "--facts", "facts.jsonl", "--text", "lore.txt", "--out", "run", *EDIT),
                 ("lore", "facts.jsonl", "lore.txt")),
    ReferenceRun("ttt", ("ttt", "base", "--text", "chants.jsonl", "--out", "run", "--chunk", "24", "--context", "72", "--rank", "2",
                         "--learning-rate", "1e-2", "--batch-size", "4", "--device", "cpu"), ("base", "chants.jsonl")),
    ReferenceRun("export", ("export", "taught", "--to", "gguf", "--out", "model.gguf", "--dtype", "q8_0"), ("taught",)),
    ReferenceRun("merge", ("export", "adapter", "--base", "base", "--to", "merged", "--out", "merged"), ("base", "adapter")),
    ReferenceRun("sample", ("sample", "taught", "--prompt", "2+3=", "4+4=", "--raw", "--n", "2", "--max-new-tokens", "6", "--top-p", "0.9",
                            "--json", "--device", "cpu"), ("taught",), said=True),
    ReferenceRun("corpus", ("corpus", "text.jsonl", "--tokenizer", "words", "--out", "made", "--held-out", "0.25"),
                 ("text.jsonl", "words")),
    ReferenceRun("compare", ("compare", "before", "after", "--json"), ("before", "after"), said=True),
    ReferenceRun("dpo", ("dpo", "--model", "taught", "--data", "signed.jsonl", "--out", "run", *PAIRS), ("taught", "signed.jsonl")),
    ReferenceRun("dpo-live", ("dpo", "--model", "taught", "--data", "signed.jsonl", "--out", "run", "--lora-r", "2", "--reference", "live",
                              "--loss-type", "ipo", *PAIRS), ("taught", "signed.jsonl")),
    ReferenceRun("simpo", ("dpo", "--model", "taught", "--data", "signed.jsonl", "--out", "run", "--loss-type", "simpo", *PAIRS),
                 ("taught", "signed.jsonl")),
    ReferenceRun("kto", ("kto", "--model", "taught", "--data", "marked.jsonl", "--out", "run", *PAIRS), ("taught", "marked.jsonl")),
    ReferenceRun("reward-model", ("reward-model", "--model", "taught", "--data", "signed.jsonl", "--out", "run",
                                  "--center-rewards-coefficient", "0.01", *PAIRS), ("taught", "signed.jsonl")),
    ReferenceRun("on-policy", ("distill", "--teacher", "taught", "--model", "base", "--data", "learned.jsonl", "--out", "run",
                               "--on-policy", "1", "--max-new-tokens", "6", "--divergence", "reverse", *TUNE),
                 ("base", "taught", "learned.jsonl")),
    ReferenceRun("episodes", ("grpo", "--model", "base", "--out", "run", *EPISODES), ("base",)),
    ReferenceRun("tools", ("grpo", "--model", "hermes", "--out", "run", *TOOLS), ("hermes",)),
    ReferenceRun("tools-tagged", ("grpo", "--model", "qwen3_coder", "--out", "run", *TOOLS), ("qwen3_coder",)),
    ReferenceRun("grpo-model", ("grpo", "--model", "taught", "--data", "sums.jsonl", "--out", "run", "--lora-r", "2", "--loss-type", "grpo",
                                *("model:judge" if word == "answer:1" else word for word in GRPO)), ("taught", "judge", "sums.jsonl")),
    ReferenceRun("nf4", ("sft", "--model", "base", "--data", "learned.jsonl", "--out", "run", "--lora-r", "2", "--base-dtype", "nf4",
                         *TUNE), ("base", "learned.jsonl")),
    ReferenceRun("int8", ("sft", "--model", "base", "--data", "learned.jsonl", "--out", "run", "--lora-r", "2", "--base-dtype", "int8",
                          "--optim", "adamw_8bit", "--use-rslora", *TUNE), ("base", "learned.jsonl")),
    ReferenceRun("mixture", ("sft", "--model", "base", "--data", "learned.jsonl:0.7", "chats.jsonl:0.3", "--out", "run",
                             "--lr-scheduler-type", "wsd", "--gradient-checkpointing", *TUNE), ("base", "learned.jsonl", "chats.jsonl")),
    ReferenceRun("mix", ("data", "mix", "learned.jsonl:0.7", "sums.jsonl:0.3", "--n", "60", "--out", "mixed.jsonl"),
                 ("learned.jsonl", "sums.jsonl")),
    ReferenceRun("split", ("data", "split", "learned.jsonl", "--share", "0.1", "--out", "parts"), ("learned.jsonl",)),
    ReferenceRun("dedup", ("data", "dedup", "said.jsonl", "--workers", "1", "--out", "single.jsonl"), ("said.jsonl",)),
    ReferenceRun("ties", ("merge", "one", "two", "--base", "base", "--method", "ties", "--density", "0.3", "--out", "merged", "--data",
                          "learned.jsonl", "--device", "cpu"), ("base", "one", "two", "learned.jsonl")),
    ReferenceRun("dare", ("merge", "one=0.7", "two=0.3", "--base", "base", "--method", "dare", "--out", "merged"), ("base", "one", "two")),
    ReferenceRun("slerp", ("merge", "one=0.7", "two=0.3", "--method", "slerp", "--out", "merged"), ("one", "two")),
    ReferenceRun("prune", ("prune", "base", "--layers", "1", "--data", "learned.jsonl", "--out", "pruned", "--device", "cpu"),
                 ("base", "learned.jsonl")),
    ReferenceRun("steer", ("steer", "taught", "--data", "signed.jsonl", "--out", "vector", "--layer", "1", "--scale", "2", "--text",
                           "chants.jsonl", "--max-cost", "5", "--device", "cpu"), ("taught", "signed.jsonl", "chants.jsonl")),
    ReferenceRun("fp8", ("export", "taught", "--to", "fp8", "--out", "small"), ("taught",)),
    ReferenceRun("w4a16", ("export", "taught", "--to", "w4a16", "--out", "small"), ("taught",)),
    ReferenceRun("tokenizer", ("tokenizer", "said.jsonl", "--out", "made", "--vocab-size", "280"), ("said.jsonl",)),
    ReferenceRun("shards", ("sft", "--model", "base", "--data", "learned.jsonl", "--out", "run", "--lora-r", "2", *TUNE, *SHARDS),
                 ("base", "learned.jsonl")),
    ReferenceRun("shards-resume", ("sft", "--model", "base", "--data", "learned.jsonl", "--out", "begun", *TUNE, *SHARDS),
                 ("base", "learned.jsonl", "begun")),
    ReferenceRun("shards-pretrain", ("pretrain", "--corpus", "corpus", "--out", "run", *PRETRAIN, *TOGETHER), ("corpus",)),
    ReferenceRun("shards-grpo", ("grpo", "--model", "taught", "--data", "sums.jsonl", "--out", "run", *GRPO, *SHARDS),
                 ("taught", "sums.jsonl")),
    ReferenceRun("fsdp", ("sft", "--model", "base", "--data", "learned.jsonl", "--out", "run", "--lora-r", "2", *TUNE, *FSDP),
                 ("base", "learned.jsonl")),
    ReferenceRun("fsdp-resume", ("sft", "--model", "base", "--data", "learned.jsonl", "--out", "parted", *TUNE, *FSDP),
                 ("base", "learned.jsonl", "parted")),
    ReferenceRun("fsdp-pretrain", ("pretrain", "--corpus", "corpus", "--out", "run", "--ema", "0.9", *PRETRAIN, *FSDP), ("corpus",)),
    ReferenceRun("fsdp-grpo", ("grpo", "--model", "taught", "--data", "sums.jsonl", "--out", "run", *GRPO, *FSDP),
                 ("taught", "sums.jsonl")),
    ReferenceRun("serve", ("plain", "base", "--adapter", "tuned=tuned"), ("base", "tuned", "greedy.json"), module=SERVED),
    ReferenceRun("serve-forms", ("forms", "caller"), ("caller",), module=SERVED),
    ReferenceRun("serve-train", ("learns", "caller", "--train", "--out", "run", "--learning-rate", "1e-3"), ("caller",), module=SERVED),
    ReferenceRun("serve-lora", ("learns", "base", "--train", "--out", "run", "--lora-r", "2", "--save-steps", "1"), ("base",),
                 module=SERVED),
    ReferenceRun("rollouts", ("rollouts", "grpo", "--model", "taught", "--data", "sums.jsonl", "--out", "run",
                              *("5e-5" if word == "2e-4" else word for word in GRPO)), ("taught", "sums.jsonl"), module=SERVED),
    ReferenceRun("rollouts-lora", ("rollouts", "grpo", "--model", "taught", "--data", "sums.jsonl", "--out", "run", "--lora-r", "2",
                                   "--no-vllm-importance-sampling-correction", *GRPO), ("taught", "sums.jsonl"), module=SERVED),
)


def make_fixtures(home: Path, needed: set[str]) -> None:
    """Make the fixtures with the package as it is; in a process of its own."""
    from assay.testing.tiny_models import save_adapter, save_model, tiny_model
    from assay.zoo.ttt_faults import repetitive_texts

    os.chdir(home)
    save_model(home / "base", tiny_model("llama"))
    _write_sums(home)
    write_lines(home / "chants.jsonl", [{"text": text} for text in repetitive_texts(6)])
    makers = {"adapter": lambda: save_adapter(home / "adapter", home / "base"), "corpus": lambda: _make_corpus(home),
              "lore": lambda: _make_lore(home), "taught": lambda: _teach(home), "before": _evaluate,
              "hermes": lambda: _teach_calls(home, "hermes"), "qwen3_coder": lambda: _teach_calls(home, "qwen3_coder"),
              "caller": lambda: _teach_calls(home, "caller"), "tuned": lambda: _make_tuned(home),
              "greedy.json": lambda: _sample(home),
              "judge": lambda: _make_judge(home), "one": lambda: _make_fine_tunes(home),
              "run": lambda: _interrupt("resume"), "begun": lambda: _interrupt("shards-resume"),
              "parted": lambda: _interrupt("fsdp-resume")}  # last: they stop all runs
    for name, make in makers.items():
        if name in needed:
            try:
                make()
            except Exception:  # runs that need it are left out, and that is said
                traceback.print_exc()


def _make_corpus(home: Path) -> None:
    from assay.testing.tiny_training import make_corpus, tiny_documents

    corpus = make_corpus(home / "making", tiny_documents())
    corpus.folder.rename(home / "corpus")
    (home / "making" / "tokenizer").rename(home / "words")
    (home / "making" / "text.jsonl").rename(home / "text.jsonl")


def _make_lore(home: Path) -> None:
    """A model that knows a few made-up facts; where two people live is to be changed."""
    from assay.model.special_tokens import resolve_special_tokens
    from assay.store.checkpoint import write_checkpoint
    from assay.store.saving import Lineage, model_contents
    from assay.testing import tiny_facts

    tokenizer, facts = tiny_facts.facts_tokenizer(), tiny_facts.fact_edits(2)
    stops = resolve_special_tokens(tokenizer, {}, {})
    write_checkpoint(home / "lore", model_contents(tiny_facts.facts_model(), tokenizer, stops, Lineage()))
    write_lines(home / "facts.jsonl", [
        {"prompt": fact.prompt, "subject": fact.subject, "target": fact.target, "old": fact.old, "paraphrases": list(fact.paraphrases),
         "neighbourhood": [{"prompt": near.prompt, "answer": near.answer} for near in fact.neighbourhood]} for fact in facts])
    tiny_facts.write_facts_text(home / "lore.txt")


def _write_sums(home: Path) -> None:
    sums = [(f"{a}+{b}=", a + b) for a in range(10) for b in range(10)]
    write_lines(home / "sums.jsonl", [{"prompt": prompt, "gold": str(gold)} for prompt, gold in sums])
    write_lines(home / "learned.jsonl", [{"prompt": prompt, "completion": said} for prompt, gold in sums
                                         for said in (str(gold), f"{gold} or {gold + 1}")])
    write_lines(home / "pairs.jsonl", [{"prompt": prompt, "chosen": str(gold), "rejected": str(gold + 1)} for prompt, gold in sums])
    write_lines(home / "judged.jsonl", [{"prompt": prompt, "completion": str(gold + number % 2), "label": number % 2 == 0}
                                        for number, (prompt, gold) in enumerate(sums)])
    write_lines(home / "signed.jsonl", [{"prompt": prompt, "chosen": f"{gold}!", "rejected": f"{gold}?"} for prompt, gold in sums])
    write_lines(home / "marked.jsonl", [{"prompt": prompt, "completion": f"{gold}{'?!'[number % 2]}", "label": number % 2 == 1}
                                        for number, (prompt, gold) in enumerate(sums)])
    write_lines(home / "said.jsonl", [{"text": f"the sum of {a} and {b} is what one gets who adds {a} to {b} {'and' * (b % 2)} counts"}
                                      for a in range(12) for b in range(6)])
    write_lines(home / "chats.jsonl", [{"messages": [{"role": "user", "content": f"{a}?"}, {"role": "assistant", "content": str(a * 2)}]}
                                       for a in range(60)])


def _teach(home: Path) -> None:
    """A model that can add, more or less."""
    from assay.cli import run

    taught = list(TUNE)
    for name, value in {"--max-steps": "150", "--batch-tokens": "512", "--micro-batch-tokens": "512", "--learning-rate": "5e-3"}.items():
        taught[taught.index(name) + 1] = value
    assert run(["sft", "--model", "base", "--data", "learned.jsonl", "--out", "teaching", "--num-train-epochs", "200", *taught]) == 0
    (home / "teaching" / "model").rename(home / "taught")


def _teach_calls(home: Path, name: str) -> None:
    """A model that asks a calculator, always the same, in one of the formats; `caller` is shown the names of its tools."""
    from assay.agents.tool_calls import TOOL_FORMATS, ToolCall
    from assay.cli import run
    from assay.testing.tiny_episodes import templated
    from assay.testing.tiny_models import TINY_CHAT_TEMPLATE, save_model, tiny_model

    form = "hermes" if name == "caller" else name
    loop = f"{{{{ message.content }}}}{{% for call in message.tool_calls or [] %}}{CALLS[form]}{{% endfor %}}"
    shown = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" if name == "caller" else ""
    template = shown + TINY_CHAT_TEMPLATE.replace("{{ message.content }}", loop)
    save_model(home / f"{name}-base", tiny_model("llama"), tokenizer=templated(template))
    said = TOOL_FORMATS[form].write("", [ToolCall("calculate", {"expression": "1+1"})]).replace("\n", "")
    asked = [f"{a}{'+-*'[(a + b) % 3]}{b}=" for a in range(10, 100, 7) for b in range(10, 100, 11)]
    tools = {"tools": [{"type": "function", "function": {"name": "calculate"}}]} if name == "caller" else {}
    write_lines(home / f"{name}.jsonl", [{"messages": [{"role": "user", "content": each}, {"role": "assistant", "content": said}], **tools}
                                         for each in asked])
    taught = list(TUNE)
    for option, value in {"--max-steps": "120", "--max-length": "128", "--batch-tokens": "1024", "--micro-batch-tokens": "1024",
                          "--learning-rate": "1e-2"}.items():
        taught[taught.index(option) + 1] = value
    assert run(["sft", "--model", f"{name}-base", "--data", f"{name}.jsonl", "--out", f"{name}-run", "--num-train-epochs", "200",
                *taught]) == 0
    (home / f"{name}-run" / "model").rename(home / name)


def _evaluate() -> None:
    from assay.cli import run

    for name, model in {"before": "base", "after": "taught"}.items():
        assert run(["eval", model, "--out", name, *EVAL]) == 0


def _make_judge(home: Path) -> None:
    """A reward model that likes what ends in an exclamation mark."""
    from assay.cli import run

    assert run(["reward-model", "--model", "taught", "--data", "signed.jsonl", "--out", "judging", *PAIRS]) == 0
    (home / "judging" / "model").rename(home / "judge")


def _make_fine_tunes(home: Path) -> None:
    """Two models that were moved a little from one base."""
    from assay.testing.tiny_models import nudge, save_model, tiny_model

    for seed, name in enumerate(("one", "two"), 1):
        save_model(home / name, nudge(tiny_model("llama"), 0.004, seed))


def _make_tuned(home: Path) -> None:
    """A proven adapter."""
    from assay.cli import run
    from assay.testing.tiny_models import save_adapter

    save_adapter(home / "tuned", home / "base")
    assert run(["prove", "tuned"]) == 0


def _sample(home: Path) -> None:
    """What the plain sampler says where the server is asked the same."""
    from assay.generate.engine import sample
    from assay.generate.generation_request import Sampling
    from assay.store.artifact import build_model, open_artifact
    from tests.mutants.served_runs import GREEDY

    base = open_artifact(home / "base")
    assert base.tokenizer is not None
    drawn = sample(build_model(base), [base.tokenizer.encode(GREEDY["prompt"])], base.stops.stop_ids,
                   Sampling(GREEDY["max_tokens"], temperature=0))
    (home / "greedy.json").write_text(json.dumps(base.tokenizer.decode(drawn[0].ids, special=False)))


def _interrupt(name: str) -> None:
    """A run that a signal ended after two of its steps, in one process."""
    from assay.cli import run
    from assay.recipes.trainer import Trainer

    over = Trainer.over

    def struck(trainer: Trainer) -> bool:
        if trainer.done == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return over(trainer)

    Trainer.over = struck  # type: ignore[method-assign]
    words = next(one.words for one in REFERENCE_RUNS if one.name == name)
    try:
        code = run(["1" if before == "--gpus" else word for before, word in zip(("", *words), words, strict=False)])
    finally:
        Trainer.over = over  # type: ignore[method-assign]
    assert code == 128 + signal.SIGTERM, code


def write_lines(file: Path, rows: list[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    make_fixtures(Path(sys.argv[1]), set(sys.argv[2:]))
