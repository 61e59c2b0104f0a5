"""Fine-tuning: what is trained, saved, forked and handed over is what was meant. Saves stay unproven here; the toy has the proofs."""

import contextlib
import functools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from assay.cli import run as assay
from assay.data.chat import TrainingExample
from assay.errors import DataError, GuardStop, StoreError, UsageError
from assay.generate.engine import sample
from assay.generate.generation_request import Sampling
from assay.guard.proof import ProofRequest, prove
from assay.learn import loss_scaling, low_bit_adamw
from assay.learn.lr_schedule import Clock
from assay.model import transformer
from assay.model.lora import LoraLinear
from assay.recipes import conversations, hand_over, memory_plan, run, sft, starting_model, teachers
from assay.recipes.options import Sft
from assay.recipes.starting_model import StartingModel
from assay.recipes.trainer import Trainer
from assay.store.artifact import build_model, open_artifact
from assay.store.checkpoint import open_checkpoint, step_folder, step_folders, write_hallmark
from assay.store.ledger import Ledger
from assay.testing.tiny_models import nudge, save_hf_folder, save_model, tiny_model
from assay.testing.tiny_training import NoProver
from assay.verdict import Outcome, Verdict, proven, refuted
from tests.recipes.sittings import rows
from tests.refusals import stopped_by

STEPS = 7


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model and sums to learn."""
    folder = tmp_path_factory.mktemp("sft")
    save_model(folder / "base", tiny_model("llama"))
    sums = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(12) for b in range(12)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    return folder


def options(home: Path, out: Path, **changed: Any) -> Sft:
    usual: dict[str, Any] = {"data": (str(home / "sums.jsonl"),), "out": str(out), "max_length": 32, "batch_tokens": 256,
                             "num_train_epochs": 2,
                             "learning_rate": 3e-3, "micro_batch_tokens": 128, "save_steps": 3, "held_out": 0.1, "max_steps": STEPS,
                             "device": "cpu"}
    return Sft(**(({} if "from_" in changed else {"model": str(home / "base")}) | usual | changed))


def test_epochs_that_no_step_reaches_are_not_planned():
    examples = [TrainingExample(str(n), (1,) * (3 + n % 5), (0,) + (1,) * (2 + n % 5), ("a",), 1) for n in range(40)]
    for packing in (True, False):
        asked = Sft(data=(), out="", max_length=16, batch_tokens=64, max_steps=30, packing=packing)
        few, many = (conversations.ordered(replace(asked, num_train_epochs=epochs), examples)[0] for epochs in (60, 10**9))
        assert many.epochs < 20
        assert [many.plan(step) for step in range(30)] == [few.plan(step) for step in range(30)]


@pytest.fixture(autouse=True)
def unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave saves unproven: what a fresh process says is the matter of tests/guard/test_proof.py and of the toy."""
    monkeypatch.setattr(run, "Prover", NoProver)
    monkeypatch.setattr(hand_over, "prove", lambda request: [proven("whole", "not looked at")])
    monkeypatch.setattr(starting_model, "prove_checkpoint", lambda folder, **_: [proven("whole", "not looked at")])


def tuned(config: Sft, say: Any = lambda _: None) -> list[Verdict]:
    found = sft.sft(config, say)
    assert found.interrupted is None
    assert all(verdict.outcome is Outcome.PROVEN for verdict in found.verdicts), str(found)
    assert found.model == Path(config.out) / "model"
    assert found.exit_code == 0
    return found.verdicts


def events(config: Sft, kind: str) -> list[dict[str, Any]]:
    return [event for event in Ledger(Path(config.out) / "ledger.jsonl").events() if event["kind"] == kind]


def evaluations(config: Sft) -> dict[int, np.ndarray]:
    return {row["step"]: np.array(row["per_document"]) for row in rows(Path(config.out) / "eval.jsonl")}

# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("changed", "words"), [
    ({"model": None}, "name what to train"),
    ({"optimizer_state": "fresh"}, "it needs --from"),
    ({"minutes": 1.0}, "give one budget"),
    ({"save_steps": 0}, "a crash would lose all of it"),
    ({"batch_tokens": 16}, "a batch of at least one row"),
    ({"lora_alpha": 8.0}, "give --lora-r too"),
    ({"lora_r": 4, "lora_target_modules": ("q_prj",)}, "q_prj match no layer"),
    ({"held_out": 0.0}, "nothing is held out"),
    ({"max_steps": 10**6}, "the data ends after"),
    ({"dtype": "fp16", "shards": 2}, "finds its loss scale in one process"),
    ({"master_dtype": "bf16", "lora_r": 4}, "an adapter's masters are small"),
    ({"master_dtype": "bf16", "dtype": "fp16"}, "computes in bf16"),
])
def test_a_request_that_makes_no_sense_is_refused(changed: dict[str, Any], words: str, home: Path, tmp_path: Path):
    with pytest.raises(UsageError, match=words) if "steps" not in changed else pytest.raises(Exception, match=words):
        sft.sft(options(home, tmp_path / "run", **changed), lambda _: None)
    assert not (tmp_path / "run").exists()


def test_no_checkpoints_is_allowed_where_it_is_short_or_insisted_on(home: Path):
    conversations.refuse_nonsense(options(home, home / "x", save_steps=0, max_steps=None, minutes=9.0))
    conversations.refuse_nonsense(options(home, home / "x", save_steps=0, insist=True))


def test_data_that_fails_its_audit_is_stopped_before_step_1(home: Path, tmp_path: Path):
    (tmp_path / "same.jsonl").write_text(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n")
    with (tmp_path / "same.jsonl").open("a") as file:
        for a in range(8):
            file.writelines([json.dumps({"prompt": f"{a}+2=", "completion": "4"}) + "\n"] * 20)
    config = options(home, tmp_path / "run", data=(str(tmp_path / "same.jsonl"),), max_steps=None, held_out=0.3)
    with stopped_by("duplicates"):
        sft.sft(config, lambda _: None)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_rows_whose_calls_the_template_loses_are_refused_by_file_and_line(home: Path, tmp_path: Path):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    answers = [{"role": "assistant", "content": f"{number}."} for number in range(20)]
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}, call if n == 6 else answer]} for n, answer in enumerate(answers)]
    (tmp_path / "calls.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"calls.jsonl:7: the chat template does not write tool_calls \('add'\) of turn 1"):
        sft.sft(options(home, tmp_path / "run", data=(str(tmp_path / "calls.jsonl"),), max_length=64), lambda _: None)


def test_one_held_out_conversation_is_refused_before_anything_is_made(home: Path, tmp_path: Path):
    (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": "99+1=", "completion": "100"}) + "\n")
    with pytest.raises(DataError, match=r"one.jsonl: 1 held-out conversation; one alone shows no spread"):
        sft.sft(options(home, tmp_path / "run", held_out_data=str(tmp_path / "one.jsonl")), lambda _: None)
    assert not (tmp_path / "run").exists()


def test_files_that_name_other_ends_are_said_before_step_1(home: Path, tmp_path: Path):
    folder, said = save_hf_folder(tmp_path / "model", tiny_model()), list[str]()
    config = options(home, tmp_path / "run", model=str(folder))
    starting_model.load_start(config, "cpu", said.append)
    assert not said, "files that agree"
    (folder / "generation_config.json").write_text('{"eos_token_id": [258, 5000]}')
    start = starting_model.load_start(config, "cpu", said.append)
    assert said == [f"{folder}: generation_config.json: eos_token_id 5000 is not an id of the tokenizer; what this run writes names "
                    f"the stop ids {', '.join(map(str, start.parent.stops.stop_ids))}"]


def test_a_start_that_reads_no_better_than_a_guess_is_said(home: Path, tmp_path: Path):
    """A tokenizer of another model of the same size: nothing else shows it before the end."""
    first, second = list[str](), list[str]()
    config = options(home, tmp_path / "run", num_train_epochs=40, max_steps=40, learning_rate=2e-2, save_steps=40)
    tuned(config, first.append)
    sft.sft(options(home, tmp_path / "again", model=str(tmp_path / "run" / "model"), max_steps=1), second.append)
    assert [any("its tokenizer.json is another model's" in line for line in said) for said in (first, second)] == [True, False]


def test_many_copies_are_said_with_their_places(home: Path, tmp_path: Path):
    rows = [{"prompt": f"{a}+{a}=", "completion": str(2 * a)} for a in range(40)] + [{"prompt": "1+1=", "completion": "2"}] * 20
    (tmp_path / "copies.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config, said = options(home, tmp_path / "run", data=(str(tmp_path / "copies.jsonl"),), max_steps=1), []
    sft.sft(config, said.append)
    (found,) = [verdict for event in events(config, "preflight") for verdict in event["verdicts"] if verdict["check"] == "duplicates"]
    assert found["outcome"] == "UNPROVEN"
    assert re.search(r"20 of \d+ examples \(\d+%\) are copies of others, such as \S*copies.jsonl:2 and \S*copies.jsonl:41", found["reason"])
    assert found["reason"] in "\n".join(said)

# ---------------------------------------------------------------- the whole model, and an adapter


@pytest.mark.arithmetic
@pytest.mark.parametrize("lora_r", [0, 4])
def test_a_run_learns_says_so_and_hands_over_what_it_scored(lora_r: int, home: Path, tmp_path: Path):
    config, said = options(home, tmp_path / "run", lora_r=lora_r), []
    tuned(config, said.append)
    seen = evaluations(config)
    assert sorted(seen) == [0, 1, 3, 6, STEPS]
    assert seen[STEPS].mean() < seen[0].mean()
    assert any("of which" in line and "are trained" in line for line in said)
    assert any("q_proj × 2" in line for line in said) is bool(lora_r)
    recorded = json.loads((tmp_path / "run" / "ledger.jsonl").read_text().splitlines()[-1])
    last = open_artifact(step_folder(tmp_path / "run" / "checkpoints", STEPS))
    model = open_artifact(tmp_path / "run" / "model")
    live, handed = (build_model(artifact).logits(build_model(artifact).hidden(torch.arange(8)[None])) for artifact in (last, model))
    assert torch.allclose(live, handed, atol=1e-5)
    assert (tmp_path / "run" / "adapter").exists() is bool(lora_r)
    assert recorded["kind"] == "hand over"
    assert recorded["unit"] == "nats per token"


def test_where_the_merged_model_cannot_be_written_no_adapter_stays_either(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usual, written = hand_over.write_export, list[str]()

    def full(best: Path, where: Path, *given: Any) -> hand_over.Export:
        if where.name == "model":
            raise StoreError("no space is left")
        written.append(where.name)
        return usual(best, where, *given)

    monkeypatch.setattr(hand_over, "write_export", full)
    with pytest.raises(StoreError, match="no space is left"):
        sft.sft(options(home, tmp_path / "run", lora_r=4), lambda _: None)
    assert written == ["adapter"]
    assert not (tmp_path / "run" / "adapter").exists()


def test_an_adapter_of_a_large_base_is_handed_over_alone(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    opened: list[Path] = []
    usual = hand_over.open_artifact
    monkeypatch.setattr(hand_over, "open_artifact", lambda path, **given: (opened.append(Path(path)), usual(path, **given))[1])
    monkeypatch.setattr(memory_plan, "MERGED_UNASKED", 1)
    found = sft.sft(options(home, tmp_path / "run", lora_r=4), lambda _: None)
    assert found.exit_code == 0
    assert found.model == tmp_path / "run" / "adapter"
    assert not (tmp_path / "run" / "model").exists()
    assert open_checkpoint(tmp_path / "run" / "adapter").hallmark is not None
    assert opened.count(home / "base") == 1, "the base is the same for all that is scored and written"
    assert starting_model.writes_merged(options(home, tmp_path / "run", lora_r=4, merge="always"), home / "base")
    monkeypatch.undo()
    assert not starting_model.writes_merged(options(home, tmp_path / "run", lora_r=4, merge="never"), home / "base")


@pytest.mark.parametrize("lora_r", [0, 4])
def test_activations_that_are_computed_again_teach_the_same(lora_r: int, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = []
    monkeypatch.setattr(transformer, "checkpoint", lambda block, *given, **options: calls.append(block) or checkpoint(
        block, *given, **options))
    kept, again = (options(home, tmp_path / name, lora_r=lora_r, gradient_checkpointing=name == "again") for name in ("kept", "again"))
    tuned(kept)
    assert not calls
    tuned(again)
    assert len(calls) >= STEPS
    digests = [open_artifact(step_folder(Path(config.out) / "checkpoints", STEPS)).digest for config in (kept, again)]
    assert digests[0] == digests[1]


def test_fine_tuning_that_improves_no_more_is_stopped_early(home: Path, tmp_path: Path):
    config, said = options(home, tmp_path / "run", early_stopping_patience=2, early_stopping_threshold=0.05, save_steps=1, max_steps=12,
                           num_train_epochs=9, learning_rate=1e-6), []
    tuned(config, said.append)
    assert any("stopping early" in line for line in said)
    assert max(evaluations(config)) == 8
    assert (tmp_path / "run" / "model").exists()


def test_the_parents_file_in_memory_is_not_what_is_trained(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    starts: list[StartingModel] = []
    whole = starting_model.load_start
    monkeypatch.setattr(sft, "load_start", lambda *given: (starts.append(whole(*given)), starts[0])[1])
    tuned(options(home, tmp_path / "run", max_steps=2))
    before = open_artifact(home / "base")
    assert all(torch.equal(starts[0].parent.raw.tensors[name], tensor) for name, tensor in before.raw.tensors.items())
    assert not all(torch.equal(parameter, before.tensors[name]) for name, parameter in starts[0].model.named_parameters())


def test_only_the_adapter_moves_and_every_part_of_it(home: Path, tmp_path: Path):
    config = options(home, tmp_path / "run", lora_r=2)
    tuned(config)
    verdicts = [verdict["check"] for event in events(config, "account") for verdict in event["verdicts"] if verdict["outcome"] == "PROVEN"]
    assert verdicts.count("frozen") == verdicts.count("movement") == len(events(config, "account"))
    patch = open_artifact(step_folder(tmp_path / "run" / "checkpoints", STEPS)).patch
    assert patch is not None
    assert all(part.left.any() for parts in patch.low_rank.values() for part in parts)
    assert not (tmp_path / "run" / "base").exists()  # its base is the one that was given


@pytest.fixture(scope="module")
def uninterrupted(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Sft]:
    """The usual run with adapters of a rank, made once for all tests that only read it."""
    @functools.cache
    def made(lora_r: int) -> Sft:
        config = options(home, tmp_path_factory.mktemp("whole") / "run", lora_r=lora_r)
        tuned(config)
        return config

    return made


@pytest.mark.parametrize("lora_r", [0, 4])
@pytest.mark.parametrize("at", [1, 5])
def test_interrupted_and_resumed_is_the_uninterrupted_run_bit_for_bit(
        lora_r: int, at: int, home: Path, uninterrupted: Callable[[int], Sft], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole, parted = uninterrupted(lora_r), options(home, tmp_path / "parted", lora_r=lora_r)
    over = Trainer.over

    def struck(trainer: Trainer) -> bool:
        if trainer.done == at:
            trainer.run.interrupted = 15
        return over(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "over", struck)
        found = sft.sft(parted, lambda _: None)
    assert (found.verdicts, found.interrupted, found.model, found.exit_code) == ([], 15, None, 143)
    tuned(parted)
    ends = [open_checkpoint(step_folder(Path(config.out) / "checkpoints", STEPS)) for config in (whole, parted)]
    assert ends[0].manifest["tensors"] == ends[1].manifest["tensors"]
    metrics = [[{k: v for k, v in row.items() if k != "seconds"} for row in rows(Path(config.out) / "metrics.jsonl")]
               for config in (whole, parted)]
    assert metrics[0] == metrics[1]


@pytest.mark.parametrize("lora_r", [0, 4])
def test_what_waited_in_memory_is_handed_over_as_if_it_had_been_saved_at_once(
        lora_r: int, home: Path, uninterrupted: Callable[[int], Sft], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(conversations, "EVALUATED_EVERY", 3)
    told, paced = uninterrupted(lora_r), options(home, tmp_path / "paced", lora_r=lora_r, save_steps=None)
    tuned(paced)
    (spent,) = events(paced, "saving")
    assert spent["copies"] > 0
    assert [event["step"] for event in events(paced, "save")] == [0, 1, STEPS]
    for name in ("adapter", "model") if lora_r else ("model",):
        ends = [open_checkpoint(Path(config.out) / name) for config in (told, paced)]
        assert ends[0].manifest["tensors"] == ends[1].manifest["tensors"]


def test_by_the_minute_it_saves_whatever_it_finds_and_evaluates_no_more_often(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    now, record = [0.0], Trainer.record

    def slow(trainer: Trainer, step: Any, **columns: Any) -> None:
        now[0] += 40  # seconds
        record(trainer, step, **columns)

    monkeypatch.setattr(Clock, "seconds", property(lambda _: now[0]))
    monkeypatch.setattr(Trainer, "record", slow)
    config = options(home, tmp_path / "run", save_steps=None, save_minutes=1.5, max_steps=8, num_train_epochs=8,
                     learning_rate=1.0)  # so high that no evaluation is better than that of step 1
    sft.sft(config, lambda _: None)
    assert min(evaluations(config), key=lambda step: evaluations(config)[step].mean()) == 1
    assert [event["step"] for event in events(config, "save")] == list(evaluations(config)) == [0, 1, 4, 7, 8]


def interrupted_after(step: int, config: Sft, monkeypatch: pytest.MonkeyPatch) -> None:
    over = Trainer.over

    def struck(trainer: Trainer) -> bool:
        if trainer.done == step:
            trainer.run.interrupted = 15
        return over(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "over", struck)
        assert sft.sft(config, lambda _: None).interrupted == 15


def same_end(step: int, *configs: Sft) -> bool:
    ends = [open_checkpoint(step_folder(Path(config.out) / "checkpoints", step)).manifest["tensors"] for config in configs]
    return all(end == ends[0] for end in ends)


def test_in_fp16_the_loss_scale_is_resumed_bit_for_bit(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From a scale that overflows, and grows after three clean steps: whoever begins with another scale computes other bits."""
    monkeypatch.setattr(loss_scaling, "FIRST_SCALE", 2.0**20)
    monkeypatch.setattr(loss_scaling, "LARGEST_SCALE", 2.0**20)
    monkeypatch.setattr(loss_scaling, "CLEAN_STEPS", 3)
    whole, parted = (options(home, tmp_path / name, lora_r=4, dtype="fp16") for name in ("whole", "parted"))
    tuned(whole)
    interrupted_after(5, parted, monkeypatch)
    tuned(parted)
    assert same_end(STEPS, whole, parted)
    read = [[row for row in rows(Path(config.out) / "metrics.jsonl") if "loss" in row] for config in (whole, parted)]
    said = [[(row["loss"], row["loss_scale"], row["recomputed_batches"]) for row in each] for each in read]
    assert said[0] == said[1]
    assert said[0][-1][2] > said[0][0][2] > 0  # it overflowed before the first step, and again where it had grown


def test_a_whole_model_in_fp16_follows_fp32(home: Path, tmp_path: Path):
    half, wide = options(home, tmp_path / "fp16", dtype="fp16", max_steps=4), options(home, tmp_path / "fp32", max_steps=4)
    losses = []
    for config in (half, wide):
        tuned(config)
        losses.append([row["loss"] for row in rows(Path(config.out) / "metrics.jsonl") if "loss" in row])
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)


def test_bf16_masters_follow_fp32_and_are_resumed_bit_for_bit(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole, parted = (options(home, tmp_path / name, master_dtype="bf16") for name in ("whole", "parted"))
    tuned(whole)
    interrupted_after(5, parted, monkeypatch)
    tuned(parted)
    assert same_end(STEPS, whole, parted)
    wide = options(home, tmp_path / "fp32", dtype="bf16")
    tuned(wide)
    begin, narrow, due = (evaluations(config)[step].mean() for config, step in ((wide, 0), (whole, STEPS), (wide, STEPS)))
    assert abs(narrow - due) < 0.1 * (begin - due)


def test_bf16_masters_of_a_wider_parent_begin_as_its_rounding(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    interrupted_after(1, options(home, tmp_path / "run", master_dtype="bf16"), monkeypatch)
    first = step_folders(tmp_path / "run" / "checkpoints")[0]
    said = {verdict.check: verdict for verdict in prove(ProofRequest(str(first)))}
    assert first.name == "step-000000"
    assert said["lineage"].outcome is Outcome.PROVEN, str(said["lineage"])


def test_steps_below_the_rounding_of_bf16_masters_come_through_by_draws_and_without_them_are_stopped(home: Path, tmp_path: Path,
                                                                                                   monkeypatch: pytest.MonkeyPatch):
    slow: dict[str, Any] = {"learning_rate": 2e-6, "warmup_steps": 0, "max_steps": 20, "num_train_epochs": 10, "save_steps": 20,
                            "master_dtype": "bf16"}
    tuned(options(home, tmp_path / "drawn", **slow))
    monkeypatch.setattr(low_bit_adamw, "stochastically_rounded", lambda values, key, step: values.bfloat16())
    with stopped_by("movement"):
        sft.sft(options(home, tmp_path / "nearest", **slow), lambda _: None)


def test_other_conversations_are_another_run(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = tmp_path / "data.jsonl"
    data.write_text((home / "sums.jsonl").read_text())
    config = options(home, tmp_path / "run", data=(str(data),))
    monkeypatch.setattr(Trainer, "over", lambda trainer: trainer.done >= 3)
    sft.sft(config, lambda _: None)
    data.write_text(data.read_text().replace('"10"', '"11"'))
    with pytest.raises(GuardStop, match="a file, the template or the split is another"):
        sft.sft(config, lambda _: None)


def test_transformers_and_peft_say_the_same_words(home: Path, uninterrupted: Callable[[int], Sft]):
    """The folders as other people open them: greedy text, not logits."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    out = Path(uninterrupted(4).out)
    base = transformers.AutoModelForCausalLM.from_pretrained(home / "base", dtype=torch.float32)
    theirs = {"model": transformers.AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32),
              "adapter": peft.PeftModel.from_pretrained(base, out / "adapter")}
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "model")
    for name, model in theirs.items():
        saved = open_artifact(out / name)
        assert saved.tokenizer is not None
        for prompt in ("3+4=", "11+5="):
            ids = saved.tokenizer.encode(prompt)
            assert tokenizer(prompt, add_special_tokens=False)["input_ids"] == ids
            ours, = sample(build_model(saved), [ids], saved.stops.stop_ids, Sampling(max_new=12, temperature=0))
            said = model.eval().generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False, pad_token_id=0)
            assert said[0, len(ids):].tolist() == list(ours.ids), name

# ---------------------------------------------------------------- forks


@pytest.fixture(scope="module")
def parent(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of an adapter whose last checkpoint carries a hallmark."""
    folder = tmp_path_factory.mktemp("parent") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "Prover", NoProver)
        patch.setattr(hand_over, "prove", lambda request: [proven("whole", "not looked at")])
        sft.sft(options(home, folder, lora_r=4), lambda _: None)
    last = step_folder(folder / "checkpoints", STEPS)
    write_hallmark(open_checkpoint(last), [proven("whole", "in this test")])
    return last


@pytest.mark.parametrize("state", ["fresh", "carried"])
def test_a_fork_begins_where_its_parent_stood_and_moves_on(state: str, parent: Path, home: Path, tmp_path: Path):
    config = options(home, tmp_path / "fork", from_=str(parent), optimizer_state=state, max_steps=1)
    tuned(config)
    assert np.abs(evaluations(config)[0] - evaluated(parent)).max() < 1e-6
    fork, = events(config, "fork")
    assert fork["verdicts"][0]["outcome"] == "PROVEN"
    first, second = (open_checkpoint(step_folder(tmp_path / "fork" / "checkpoints", step)) for step in (0, 1))
    recorded = open_checkpoint(parent).manifest["tensors"]["adapter_model.safetensors"]
    assert first.manifest["tensors"]["adapter_model.safetensors"] == recorded
    assert second.manifest["tensors"]["adapter_model.safetensors"] != recorded
    assert (second.trainer() or {})["steps_before"] == (STEPS if state == "carried" else 0)


def evaluated(checkpoint: Path) -> np.ndarray:
    return np.array(next(row["per_document"] for row in rows(checkpoint.parent.parent / "eval.jsonl") if row["step"] == STEPS))


def test_moments_that_are_carried_change_the_way(parent: Path, home: Path, tmp_path: Path):
    for state in ("fresh", "carried"):
        tuned(options(home, tmp_path / state, from_=str(parent), optimizer_state=state, max_steps=2))
    ends = [open_checkpoint(step_folder(tmp_path / state / "checkpoints", 2)).manifest["tensors"] for state in ("fresh", "carried")]
    assert ends[0] != ends[1]


def test_what_was_never_proven_is_not_forked(parent: Path, home: Path, tmp_path: Path):
    unproven = parent.with_name("step-000006")
    with pytest.raises(UsageError, match="carries no hallmark"):
        sft.sft(options(home, tmp_path / "fork", from_=str(unproven), optimizer_state="fresh"), lambda _: None)
    with pytest.raises(UsageError, match="say what becomes of the parent's moments"):
        sft.sft(options(home, tmp_path / "fork", from_=str(parent)), lambda _: None)
    with pytest.raises(UsageError, match="leave the --lora options out"):
        sft.sft(options(home, tmp_path / "fork", from_=str(parent), optimizer_state="fresh", lora_r=8), lambda _: None)


@pytest.mark.parametrize("lost", ["adapter", "weights"])
def test_a_child_that_does_not_start_as_its_parent_is_stopped(lost: str, parent: Path, home: Path, tmp_path: Path,
                                                              monkeypatch: pytest.MonkeyPatch):
    """The parent's adapter is not loaded, or is loaded and something else with it."""
    def strayed(artifact: Any, *dtype: Any) -> Any:
        model = build_model(artifact, *dtype)
        layers = [module for module in model.modules() if isinstance(module, LoraLinear)]
        with torch.no_grad():
            for layer in layers if lost == "adapter" else []:
                for left in layer.lefts:
                    left.zero_()
        return model if lost == "adapter" else nudge(model, 0.05)

    monkeypatch.setattr(starting_model, "build_model", strayed)
    with stopped_by("fork"):
        sft.sft(options(home, tmp_path / "fork", from_=str(parent), optimizer_state="fresh", max_steps=3), lambda _: None)

# ---------------------------------------------------------------- new tokens


@pytest.mark.parametrize("first", ["killed", "refuted"])
@pytest.mark.parametrize("made", ["base", "student"])
def test_what_a_session_made_and_did_not_prove_is_proven_by_the_next(made: str, first: str, home: Path, tmp_path: Path, monkeypatch):
    asked: list[Path] = []

    def prove(folder: Path, **_: Any) -> list[Verdict]:
        asked.append(folder)
        if first == "killed" and len(asked) == 1:
            raise KeyboardInterrupt
        return [(refuted if first == "refuted" else proven)("answers", "probe logits")]

    def make() -> None:
        if made == "base":
            starting_model.prepared(options(home, tmp_path, new_tokens=("<think>",)), open_artifact(home / "base"), lambda _: None)
        else:
            teachers.make_student(tmp_path / "student", open_artifact(deep), 2, lambda _: None)

    deep = save_model(tmp_path / "deep", tiny_model("llama", depth=4, windows=(None,) * 4)).folder
    monkeypatch.setattr(starting_model, "prove_checkpoint", prove)
    with pytest.raises(KeyboardInterrupt if first == "killed" else GuardStop):
        make()
    with contextlib.nullcontext() if first == "killed" else pytest.raises(GuardStop, match="is not proven"):
        make()
    assert asked == [tmp_path / made] * 2
    write_hallmark(open_checkpoint(tmp_path / made), [proven("answers", "probe logits")])
    make()
    assert len(asked) == 2


@pytest.mark.parametrize("lora_r", [0, 4])
def test_new_tokens_have_rows_in_a_base_of_their_own(lora_r: int, home: Path, tmp_path: Path):
    data = tmp_path / "think.jsonl"
    data.write_text("".join(json.dumps({"question": f"{a}+{b}?", "answer": f"{a} and {b}.\n#### {a + b}"}) + "\n"
                            for a in range(10) for b in range(10)))
    tokens = ("<think>", "</think>", "<answer>", "</answer>")
    config = options(home, tmp_path / "run", data=(str(data),), gsm8k="think", new_tokens=tokens, lora_r=lora_r, max_length=128,
                     batch_tokens=1024, num_train_epochs=4, max_steps=3)
    tuned(config)
    base, model = open_artifact(tmp_path / "run" / "base"), open_artifact(tmp_path / "run" / "model")
    for artifact in (base, model):
        assert artifact.tokenizer is not None
        assert all(len(artifact.tokenizer.encode(token)) == 1 for token in tokens)
    row = base.tokenizer.encode("<answer>")[0]  # type: ignore[union-attr]
    assert base.tensors["embed.weight"][row].any()
    assert torch.equal(base.tensors["embed.weight"][row], model.tensors["embed.weight"][row]) is bool(lora_r)


def test_the_command_line_takes_from(capsys: pytest.CaptureFixture[str]):
    assert assay(["sft", "--help"]) == 0
    assert "--from CHECKPOINT" in capsys.readouterr().out
    assert assay(["sft", "--data", "x.jsonl", "--out", "y", "--from", "nowhere", "--optimizer-state", "fresh"]) != 0
    assert "nowhere" in capsys.readouterr().err

# ---------------------------------------------------------------- which is the best, and whether it is better


def scored(config: Sft, monkeypatch: pytest.MonkeyPatch, losses: list[list[float]], tokens: list[int]) -> tuple[Any, list[str]]:
    """The run, with evaluations that find what is given, one after the other; scored again, a checkpoint scores what it did."""
    from assay.evaluation.held_out_loss import HeldOut
    from assay.statistics.estimate import ratio

    found, weights, said = iter(losses), np.array(tokens, float), []
    monkeypatch.setattr(hand_over, "check_evaluated", lambda *_: proven("score", "not looked at"))

    def score(model: Any, **_: Any) -> HeldOut:
        each = np.array(next(found, losses[-1]))
        estimate = ratio(each * weights, weights)
        return HeldOut(estimate, "nats per token", estimate.mean, each, tokens=weights)

    monkeypatch.setattr(sft, "score_examples", score)
    return sft.sft(config, said.append), said


def test_the_best_is_the_best_by_the_score_that_is_printed(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A long conversation outweighs the short ones in the loss over tokens, and is one of five in a mean over conversations."""
    losses = [[2.0, 2.0, 2.0, 2.0, 2.0], [1.0, 1.9, 1.9, 1.9, 1.9], [1.9, 0.1, 0.1, 0.1, 0.1], [1.9, 1.9, 1.9, 1.9, 1.9]]
    config = options(home, tmp_path / "run", max_steps=4, save_steps=2)
    outcome, said = scored(config, monkeypatch, losses, [100, 1, 1, 1, 1])
    printed = {int(line.split()[1].rstrip(":")): float(line.split("held-out ")[1].split()[0]) for line in said if "held-out " in line
               and line.startswith("step")}
    best = next(line for line in said if line.startswith("best: "))
    assert best.startswith(f"best: step-{min(printed, key=lambda step: printed[step]):06d}"), (printed, best)
    assert printed == {0: 2.0, 1: pytest.approx(1.0346, abs=1e-3), 2: pytest.approx(1.83, abs=1e-2), 4: 1.9}
    assert "improvement" in [verdict.check for verdict in outcome.verdicts]


def test_a_run_that_made_its_model_worse_says_so(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    losses = [[1.0, 1.1, 1.2, 1.0, 1.1], [2.0, 2.1, 2.2, 2.0, 2.1]]
    outcome, said = scored(options(home, tmp_path / "run", max_steps=4, save_steps=2), monkeypatch, losses, [1, 1, 1, 1, 1])
    (found,) = [verdict for verdict in outcome.verdicts if verdict.check == "improvement"]
    assert found.outcome is Outcome.UNPROVEN
    assert "no checkpoint scores better than the model that the run began with" in found.reason
    assert any("training has made it worse" in line for line in said)
    assert outcome.exit_code == 3


def test_an_adapter_with_another_alpha_than_was_asked_for_is_refuted(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usual = starting_model.fresh
    monkeypatch.setattr(starting_model, "fresh",
                        lambda config, planned, rank, scale, *given: usual(config, planned, rank, 2 * scale, *given))
    with stopped_by("adapter scale"):
        sft.sft(options(home, tmp_path / "run", lora_r=4, lora_alpha=8.0), lambda _: None)
