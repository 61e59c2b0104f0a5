"""A run whose parameters lie in parts with several processes is the run of one process, up to rounding, and loses nothing."""

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from assay.data.token_corpus import open_corpus
from assay.errors import UsageError
from assay.generate.sampler_weights import tensor_checksums
from assay.learn import sharded, streamed
from assay.model.families import hf_layout, to_foreign
from assay.model.transformer import initialised
from assay.model.world import World, join_world
from assay.outcome import RunOutcome
from assay.recipes import distill, dpo, grpo, hand_over, kto, pretrain, reward_model, run, sft, starting_model
from assay.recipes.options import Distill, Sft
from assay.recipes.processes import require_global
from assay.store import shared_save
from assay.store.checkpoint import Checkpoint, open_checkpoint, step_folders
from assay.store.digests import recorded_digest, weights_digest
from assay.store.ledger import read_chain
from assay.strict_json import read_json_lines
from assay.testing.tiny_models import save_model, tiny_model
from assay.testing.tiny_training import NoProver
from assay.testing.two_processes import fork_processes
from assay.verdict import proven
from tests.live_bytes import LiveBytes
from tests.recipes import sums
from tests.recipes.sittings import options as pretrain_options
from tests.recipes.sittings import sit

CLOSE = 2e-4  # of a weight after a few steps; a share left out or counted twice is 20 times as far


@pytest.fixture(autouse=True)
def unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave saves unproven: what a fresh process says is the matter of tests/guard/test_proof.py and of the toy."""
    monkeypatch.setattr(run, "Prover", NoProver)
    monkeypatch.setattr(hand_over, "prove", lambda request: [proven("whole", "not looked at")])
    monkeypatch.setattr(starting_model, "prove_checkpoint", lambda folder, **_: [proven("whole", "not looked at")])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    save_model(folder / "base", tiny_model("llama"))
    sums.write(folder / "learned.jsonl", [{"prompt": f"{a}+{b}=", "completion": said} for a in range(10) for b in range(10)
                                          for said in (str(a + b), f"{a + b} or {a + b + 1}")])
    asked = [(f"{a}+{b}=", a + b) for a in range(8) for b in range(5)]
    sums.write(folder / "pairs.jsonl", [{"prompt": prompt, "chosen": f"yes {due}", "rejected": f"no {due + 1}"} for prompt, due in asked])
    sums.write(folder / "answers.jsonl", [{"prompt": prompt, "completion": str(due + due % 2), "label": due % 2 == 0}
                                          for prompt, due in asked])
    sums.write(folder / "sums.jsonl", [{"prompt": prompt, "gold": str(due)} for prompt, due in asked])
    return folder


def fit(home: Path, out: Path, **changes: Any) -> Sft:
    """Seven rows a step: no number of processes divides them."""
    given: dict[str, Any] = {
        "model": str(home / "base"), "out": str(out), "data": (str(home / "learned.jsonl"),), "max_length": 32, "batch_tokens": 224,
        "micro_batch_tokens": 64, "num_train_epochs": 2, "max_steps": 5, "save_steps": 3, "held_out": 0.1, "learning_rate": 3e-3,
        "device": "cpu", "fsdp": True, "process_timeout": 90.0}
    return Sft(**(given | changes))


def quietly(recipe: Callable[..., RunOutcome], config: Any) -> RunOutcome:
    """Run a recipe whose lines are kept beside its folder instead of printed."""
    Path(config.out).parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{config.out}.said").open("a", buffering=1) as said:
        return recipe(config, lambda line: print(line, file=said))


def last(out: Path) -> Checkpoint:
    return open_checkpoint(step_folders(out / "checkpoints")[-1])


def assert_near(found: Checkpoint, due: Checkpoint) -> None:
    assert found.step == due.step
    for one, other in ((found.weights(), due.weights()), (found.optimizer() or {}, due.optimizer() or {})):
        assert one.keys() == other.keys()
        assert all(torch.allclose(one[name], other[name], atol=CLOSE) for name in other)


def digests(found: Checkpoint) -> tuple[str, dict[str, str]]:
    """Digests of logical tensors, in whatever files they lie."""
    return recorded_digest(found.manifest), {
        name: facts["sha256"] for file, tensors in found.manifest["tensors"].items() if file.startswith("optimizer")
        for name, facts in tensors.items()}


def preflight_of(out: Path) -> dict[str, Any]:
    events = [event for event in read_chain(out / "ledger.jsonl").events if event["kind"] == "preflight"]
    return {verdict["check"]: verdict for verdict in events[-1]["verdicts"]}


@pytest.fixture(scope="module")
def whole(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sft with all options of the others, by one process."""
    out = tmp_path_factory.mktemp("one") / "run"
    with pytest.MonkeyPatch.context() as patch:
        sums.unproven(patch)
        quietly(sft.sft, fit(home, out))
    return out


@pytest.fixture(scope="module")
def teacher(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One who knows more than nothing."""
    out = tmp_path_factory.mktemp("teacher") / "run"
    with pytest.MonkeyPatch.context() as patch:
        sums.unproven(patch)
        quietly(sft.sft, fit(home, out, max_steps=12, learning_rate=1e-2, save_steps=12, fsdp=False, num_train_epochs=9))
    return out / "model"


def test_sft_in_parts_is_near_sft_in_one_piece_and_its_files_are_shared_out(home: Path, whole: Path, tmp_path: Path):
    out = tmp_path / "run"
    assert fork_processes(partial(quietly, sft.sft, fit(home, out)), 3) == [0, 0, 0]
    found = last(out)
    assert_near(found, last(whole))
    assert {name for name in found.manifest["files"] if name.startswith("model-")} == {
        f"model-0000{part}-of-00003.safetensors" for part in (1, 2, 3)}
    assert weights_digest(found.weights()) == recorded_digest(found.manifest)
    parity = preflight_of(out)["world_parity"]
    assert parity["outcome"] == "PROVEN"
    assert 0 < parity["evidence"]["apart"] < 1e-5
    sizes = [found.manifest["files"][f"model-0000{part}-of-00003.safetensors"]["bytes"] for part in (1, 2, 3)]
    assert max(sizes) < 0.6 * sum(sizes)


@pytest.fixture(scope="module")
def halves(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same by two processes, with one micro-batch computed twice in every other step."""
    out = tmp_path_factory.mktemp("two") / "run"
    with pytest.MonkeyPatch.context() as patch:
        sums.unproven(patch)
        assert fork_processes(partial(quietly, sft.sft, fit(home, out, replay_steps=2)), 2) == [0, 0]
    return out


def test_the_same_processes_give_the_same_bits_interrupted_and_streamed_too(home: Path, halves: Path, tmp_path: Path,
                                                                            monkeypatch: pytest.MonkeyPatch):
    """Tiny matrices are held otherwise. The checks before step 1, a resume in the middle and every save see one matrix at a time."""
    monkeypatch.setattr(streamed, "HELD_BYTES", 0)
    out = tmp_path / "run"
    assert fork_processes(partial(_interrupted, partial(quietly, sft.sft, fit(home, out)), 2), 2) == [0, 0]
    assert fork_processes(partial(quietly, sft.sft, fit(home, out)), 2) == [0, 0]
    assert digests(last(out)) == digests(last(halves))
    due, found = preflight_of(halves), preflight_of(out)
    assert {name: verdict["outcome"] for name, verdict in found.items()} == {
        name: verdict["outcome"] for name, verdict in due.items() if name != "replay"}
    assert due["replay"]["outcome"] == "PROVEN"


def test_other_tools_open_what_several_processes_wrote(halves: Path):
    transformers = pytest.importorskip("transformers")
    opened, due = transformers.AutoModelForCausalLM.from_pretrained(last(halves).folder), last(halves).weights()
    assert all(torch.equal(tensor, due[name]) for name, tensor in opened.state_dict().items() if name in due)


def test_an_adapter_in_parts_is_near_one_in_one_piece_interrupted_and_streamed_too(home: Path, tmp_path: Path,
                                                                                   monkeypatch: pytest.MonkeyPatch):
    quietly(sft.sft, fit(home, tmp_path / "one", lora_r=4))
    monkeypatch.setattr(streamed, "HELD_BYTES", 0)
    in_parts = note_openings(monkeypatch, tmp_path)
    act = partial(quietly, sft.sft, fit(home, tmp_path / "two", lora_r=4))
    assert fork_processes(partial(_interrupted, act, 2), 2) == [0, 0]
    assert fork_processes(act, 2) == [0, 0]
    assert in_parts() == 3  # the resume opens the base and then the checkpoint
    assert_near(last(tmp_path / "two"), last(tmp_path / "one"))


def note_openings(monkeypatch: pytest.MonkeyPatch, where: Path) -> Callable[[], int]:
    """How often process 0 sent a model to all in parts."""
    usual = sharded.ShardedModel.open_in_parts

    def noted(model: sharded.ShardedModel, stored: sharded.StoredTensors) -> None:
        drawn = {"lefts", "rights"}  # an adapter's own
        assert all(p.is_meta for name, p in model.model.blocks.named_parameters() if not drawn & set(name.split("."))) or model.stored
        with (where / "openings").open("a") as file:
            file.write("in parts\n")
        usual(model, stored)

    monkeypatch.setattr(sharded.ShardedModel, "open_in_parts", noted)
    return lambda: len((where / "openings").read_text().splitlines()) if (where / "openings").exists() else 0


def lessons(home: Path, teacher: Path, out: Path, recipe: str) -> Callable[[], RunOutcome]:
    """Five rows a step, of KTO two: one of three processes has none."""
    tokens = {"distill": 120, "own words": 120, "dpo": 480, "kto": 192, "reward": 480}.get(recipe, 0)
    given: dict[str, Any] = {"out": str(out), "max_length": 24, "batch_tokens": tokens, "micro_batch_tokens": 48, "num_train_epochs": 2,
                             "max_steps": 3, "save_steps": 2, "held_out": 0.1, "learning_rate": 1e-3, "device": "cpu", "fsdp": True,
                             "process_timeout": 90.0, "model": str(home / "base")}
    if recipe in ("distill", "own words"):
        return partial(quietly, distill.distill, Distill(**given, data=(str(home / "learned.jsonl"),), teacher=str(teacher),
                                                         on_policy=0.7 if recipe == "own words" else 0.0))
    if recipe == "dpo":
        return partial(quietly, dpo.dpo, dpo.Dpo(**given, data=(str(home / "pairs.jsonl"),), lora_r=4))
    if recipe == "kto":
        return partial(quietly, kto.kto, kto.Kto(**given, data=(str(home / "answers.jsonl"),)))
    if recipe == "reward":
        return partial(quietly, reward_model.reward_model, reward_model.RewardModel(**given, data=(str(home / "pairs.jsonl"),)))
    if recipe == "episodes":
        return partial(quietly, grpo.grpo, grpo.Grpo(
            model=str(home / "base"), out=str(out), environment="assay.testing.echo_environment:Echo", tasks=24, held_out=0.3, prompts=2,
            num_generations=3, max_completion_length=6, max_turns=2, max_steps=2, num_train_epochs=50, learning_rate=1e-3, warmup_steps=0,
            save_steps=2, eval_prompts=2, micro_batch_size=4, device="cpu", reward_workers=1, fsdp=True, process_timeout=90.0))
    return partial(quietly, grpo.grpo, sums.options(home / "a" / "b" / "c", out, model=str(teacher), max_steps=2, prompts=3,
                                                    num_generations=3, micro_batch_size=2, learning_rate=1e-3, fsdp=True,
                                                    overlong_buffer=7, process_timeout=90.0))  # so that rewards differ by length


SAMPLED = ("grpo", "own words", "episodes")  # by process 0, which holds the model whole


@pytest.mark.parametrize(("recipe", "processes"), [
    *(pytest.param(recipe, 2, marks=pytest.mark.slow) for recipe in ("distill", "dpo", "episodes")), ("kto", 3), ("grpo", 2), ("reward", 2),
    ("own words", 2)])
def test_other_recipes_in_parts_are_near_themselves_in_one_piece(recipe: str, processes: int, home: Path, teacher: Path, tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch):
    one, two = (lessons(home, teacher, tmp_path / name, recipe) for name in ("one", "two"))
    prove = starting_model.require_proven

    def noted(where: Path, **named: Any) -> None:
        (tmp_path / f"{where.parent.name} by {os.environ.get('RANK')}").touch()
        prove(where, **named)

    monkeypatch.setattr(starting_model, "require_proven", noted)
    one()
    monkeypatch.setattr(streamed, "HELD_BYTES", 0)
    in_parts = note_openings(monkeypatch, tmp_path)
    assert fork_processes(two, processes) == [0] * processes
    assert in_parts() == (recipe not in SAMPLED)
    said = (tmp_path / "two.said").read_text()
    assert ("nobody holds the model whole" if in_parts() else "process 0 opens the model whole before it is cut: it samples") in said
    assert_near(last(tmp_path / "two"), last(tmp_path / "one"))
    made = [file.name for file in tmp_path.glob("two by *")]  # RUN/base, with a row for the reward's token
    assert made == (["two by 0"] if recipe == "reward" else [])
    assert all(row["grad_norm"] > 0 for row in read_json_lines(tmp_path / "two" / "metrics.jsonl") if "grad_norm" in row)
    parity = preflight_of(tmp_path / "two")["world_parity"]
    assert parity["outcome"] == "PROVEN"
    assert (recipe != "kto") == (0 < parity["evidence"]["apart"] < 1e-4)  # two rows are added in one order alone


@pytest.mark.parametrize(("processes", "lora_r"), [
    pytest.param(2, 0, marks=pytest.mark.slow), (4, 0), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_no_process_ever_holds_more_than_its_part(processes: int, lora_r: int, home: Path, tmp_path: Path):
    """Bytes of its own, at the most, from opening the model until it lies in parts: its rows of weights and moments, once, and a few
    tensors under way, of which the largest is an eighteenth of the model. Process 0 held three times the weights when it held them whole. A
    frozen base has no moments."""
    model = tiny_model("llama", hidden=8192, depth=12, windows=(None,) * 12)
    weights = {name: 4 * p.numel() for name, p in model.named_parameters()}
    save_model(tmp_path / "deep", model)
    config = fit(home, tmp_path / "run", model=str(tmp_path / "deep"), lora_r=lora_r)
    assert fork_processes(partial(_cut, config, tmp_path), processes) == [0] * processes
    most = [float((tmp_path / f"bytes-{rank}").read_text()) for rank in range(processes)]
    share = (1 if lora_r else 3) * sum(weights.values()) / processes
    assert min(most) >= share
    assert max(most) < share + 4 * max(weights.values())  # process 0, which reads and sends: 3.3 of them; rows held twice: 4.5


def _cut(config: Sft, where: Path) -> None:
    torch.set_num_threads(1)
    world = join_world("cpu", 90.0)
    with world:
        calls = world.calls()
        with LiveBytes() as live:
            _lie_in_parts(world, calls, config)
    (where / f"bytes-{world.rank}").write_text(str(live.peak))


def _lie_in_parts(world: World, calls: Iterator[dict[str, Any]], config: Sft) -> sharded.ShardedModel:
    """Opened, cut, and together bit for bit what the file holds."""
    start = starting_model.load_start(config, "cpu", lambda _: None)
    optimizer = sft.tuning_optimizer(config, start)
    whole = sharded.ShardedModel(world, start.model, optimizer, sft.next_token, tensor_checksums)
    if world.rank > 0:
        for call in calls:
            getattr(whole, call["do"])(**call["given"])
            if call["do"] == "unlike_before":
                return whole
    assert start.weights.stored is not None
    whole.open_in_parts(start.weights.stored)
    whole.shard()
    assert whole.unlike_before() == []
    return whole


@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adamw", marks=pytest.mark.slow)])
def test_pretraining_in_parts_with_an_average(optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The average is swapped in and out for every evaluation: what the next step gathers are the weights that are trained. What two
    processes draw in parts, and go on with in parts, is what one draws whole."""
    config = partial(pretrain_options, tokens=6 * 256, ema=0.9, optimizer=optimizer, fsdp=True, process_timeout=90.0)
    sit(config(tmp_path / "one"))
    monkeypatch.setattr(streamed, "HELD_BYTES", 0)
    in_parts, act = note_openings(monkeypatch, tmp_path), partial(sit, config(tmp_path / "two"))
    assert fork_processes(partial(_interrupted, act, 1), 2) == [0, 0]
    begun = open_checkpoint(step_folders(tmp_path / "two" / "checkpoints")[0])
    plan = pretrain.derived(config(tmp_path / "two"), open_corpus(Path(config(tmp_path / "two").corpus)), "cpu")
    drawn = {name: p.detach() for name, p in initialised(plan.model, 0, plan.spread).named_parameters()}
    assert (begun.step, recorded_digest(begun.manifest)) == (0, weights_digest(to_foreign(hf_layout(plan.model), drawn)))
    assert fork_processes(act, 2) == [0, 0]
    assert in_parts() == 3
    assert_near(last(tmp_path / "two"), last(tmp_path / "one"))


def test_begun_by_two_processes_continued_by_three_and_finished_by_one(home: Path, whole: Path, tmp_path: Path):
    """Within the distance of rounding; the ledger says that the bits are not those of the uninterrupted run."""
    out = tmp_path / "run"
    for count, step in ((2, 2), (3, 4)):
        assert fork_processes(partial(_interrupted, partial(quietly, sft.sft, fit(home, out)), step), count) == [0] * count
        assert last(out).step == step
    quietly(sft.sft, fit(home, out))
    assert_near(last(out), last(whole))
    changed = [event["changed"] for event in read_chain(out / "ledger.jsonl").events if event["kind"] == "not bit-exact"]
    assert changed == [{"processes": "2 → 3"}, {"processes": "3 → 1"}]


def _interrupted(act: Callable[[], Any], step: int) -> None:
    over = sft.Trainer.over

    def stop(trainer: Any) -> bool:
        if trainer.done == step:
            trainer.run.interrupted = 15
        return over(trainer)

    sft.Trainer.over = stop  # type: ignore[method-assign]
    act()


def test_a_process_that_dies_while_it_writes_costs_no_checkpoint(home: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Process 1 in the third save, and process 0 when that is made again."""
    right, out = shared_save.write_tensors, tmp_path / "run"
    for who, saves in ((1, 2), (0, 0)):
        written: list[Path] = []

        def die(path: Path, tensors: Any, *given: Any) -> Any:
            written.append(path)  # noqa: B023 - called before the next begins
            if os.environ.get("RANK") == str(who) and len(written) > 2 * saves:  # noqa: B023
                path.write_bytes(b"half")
                os._exit(77)
            return right(path, tensors, *given)

        with monkeypatch.context() as patch:
            patch.setattr(shared_save, "write_tensors", die)
            codes = fork_processes(partial(quietly, sft.sft, fit(home, out, process_timeout=5.0)), 2)
        assert (codes[who], codes[1 - who]) == (77, 1)
        assert [open_checkpoint(folder).step for folder in step_folders(out / "checkpoints")] == [0, 1]
    assert fork_processes(partial(quietly, sft.sft, fit(home, out)), 2) == [0, 0]
    assert_near(last(out), last(whole))


def test_a_process_that_dies_in_an_evaluation_is_said_in_words(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                               capfd: pytest.CaptureFixture[str]):
    usual = sharded.ShardedModel.lend

    def die(model: sharded.ShardedModel) -> None:
        if os.environ.get("RANK") == "1":
            os._exit(77)
        usual(model)

    monkeypatch.setattr(sharded.ShardedModel, "lend", die)
    assert fork_processes(partial(quietly, sft.sft, fit(home, tmp_path / "run", process_timeout=5.0)), 2) == [1, 77]
    assert "another process died" in capfd.readouterr().out


def test_a_process_that_hangs_ends_the_run_within_the_stated_time(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                  capfd: pytest.CaptureFixture[str]):
    right = sharded.rows_of
    calls: list[int] = []
    hung, ended = tmp_path / "hung", tmp_path / "ended"

    def hang(*given: Any) -> Any:
        calls.append(0)
        if os.environ.get("RANK") == "1" and len(calls) > 4:
            hung.write_text(str(time.monotonic()))
            while not ended.exists() and time.monotonic() < float(hung.read_text()) + 60:
                time.sleep(0.05)
            os._exit(77)
        return right(*given)

    def act() -> None:
        try:
            quietly(sft.sft, fit(home, tmp_path / "run", process_timeout=3.0))
        finally:
            ended.write_text(str(time.monotonic()))

    monkeypatch.setattr(sharded, "rows_of", hang)
    assert fork_processes(act, 2) == [1, 77]
    assert "another process died or did not answer within 3 s" in capfd.readouterr().out
    assert float(ended.read_text()) - float(hung.read_text()) < 3 + 40  # the process that hangs is alive all the while, for 60


@pytest.mark.parametrize(("recipe", "options", "said"), [
    (distill.distill, partial(Distill, teacher="t", how="stored"), "--fsdp with --how stored"),
    (grpo.grpo, partial(grpo.Grpo, reward=("r",), entropy_weight=0.1), "--fsdp with --entropy-weight")])
def test_what_does_not_shard_says_so(recipe: Any, options: Any, said: str):
    with pytest.raises(UsageError, match=said):
        recipe(options(model="m", out="o", fsdp=True, data=("x.jsonl",)), lambda _: None)


def test_processes_are_shards_under_fsdp(home: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="with FSDP the processes are the shards"):
        quietly(sft.sft, fit(home, tmp_path / "run", shards=4))


def test_a_part_of_a_value_is_no_metric():
    from assay.errors import GuardStop
    from assay.learn.loop import Step

    class Part(torch.Tensor):
        def to_local(self) -> torch.Tensor:
            return self

    with pytest.raises(GuardStop, match="grad_norm is a part of a value"):
        require_global(Step(3, torch.tensor(1.0), torch.tensor(1.0).as_subclass(Part), 1.0, 1, 1.0))
