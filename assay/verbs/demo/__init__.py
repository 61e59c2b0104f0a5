"""assay demo: the main job on a tiny model, on the CPU, from the first save to the last proof."""

import time
from dataclasses import dataclass
from pathlib import Path

from assay.config import option


@dataclass(frozen=True)
class FLAGS:
    """Build a tiny model, save it, prove it, export it to Hugging Face and GGUF and prove those, then break a copy in five ways
    and show each refused. Pretrain a model on made-up text, kill it, resume it, and compare it bit for bit with a run that was
    left alone. Fine-tune one on sums, the whole of it and by an adapter, fork that, distil; reinforce, evaluate, compare, probe;
    edit a fact, learn at test time, and write the report. Needs no network and no GPU."""

    out: str = option("folder for the demo's run; an earlier demo there is replaced", default="demo-run")


EXAMPLES = "  assay demo\n  assay demo --out /tmp/demo"


def run(flags: FLAGS) -> int:
    from assay.verbs.demo import stages
    from assay.verbs.demo.stages import fresh_folder, print_heading

    start, folder = time.perf_counter(), fresh_folder(Path(flags.out))
    print_heading("1. a tiny Llama is built and saved: temp folder → fsync → rename, every tensor hashed")
    checkpoint = stages.build_and_save(folder / "checkpoints" / "step-000000")
    print_heading("2. a fresh process opens the bytes and proves them")
    failed = [] if stages.all_proven(stages.prove_own(checkpoint)) else ["the saved checkpoint"]
    print_heading("3. exports, each proven against the source in a fresh process")
    failed += stages.export_and_prove(checkpoint, folder)
    print_heading("4. five broken copies; each must be refused")
    failed += stages.breakages_not_refused(checkpoint, folder / "broken")
    print_heading("5. a model is pretrained on made-up text, killed on the way, and resumed; another one is left alone")
    failed += stages.pretrain_kill_resume(folder)
    print_heading("6. sums are taught to the whole model, to an adapter on it, which is forked, "
                  "and by the model to a student that knows nothing")
    failed += stages.fine_tune_and_distill(checkpoint, folder)
    print_heading("7. exact answers are reinforced, and what that was worth is evaluated, compared and probed beside the parent")
    failed += stages.reinforce(folder) or stages.evaluate_and_compare(folder)
    print_heading("8. two facts are edited and the edits traced; a text is read by a model that learns while it reads")
    failed += [*stages.edit_and_trace(folder), *stages.train_at_test_time(checkpoint, folder)]
    print_heading("9. one page for the run, and a table of all of them")
    failed += stages.write_report_and_board(folder)
    outcome = f"FAILED: {', '.join(failed)}" if failed else "done and proven"
    print(f"\n{outcome} in {time.perf_counter() - start:.0f} s; everything is in {folder}/")
    return 3 if failed else 0
