"""assay export: write a model in another format, proven against the source before it counts."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from assay.config import argument, option
from assay.verdict import Outcome, Verdict, overall, unproven

if TYPE_CHECKING:
    from assay.store.artifact import Artifact

_ROW_TOKENS, _LEAST_ROWS, _MOST_ROWS = 256, 16, 128  # of the text that gptq is fitted to


@dataclass(frozen=True)
class FLAGS:
    """Write PATH in another format. A fresh process then opens what was written: it must give the source's answers, within what the
    number format allows; merged weights must also differ from the base."""

    path: str = argument("checkpoint, Hugging Face or PEFT folder, or GGUF file")
    to: Literal["hf", "peft", "gguf", "merged", "fp8", "w8a8", "w4a16", "gptq"] = option(
        "format to write: a Hugging Face folder (hf), a PEFT adapter (peft), a GGUF file (gguf), an adapter merged into its base "
        "(merged), or a quantised compressed-tensors folder for vLLM and transformers: 8-bit floats (fp8), 8-bit integers (w8a8), 4-bit "
        "integers with plain rounding (w4a16) or with GPTQ by llm-compressor (gptq, needs --text); fp8 and w8a8 also quantise activations "
        "at run time")
    out: str = option("folder or, with --to gguf, file to write; it must not exist", metavar="PATH")
    dtype: str | None = option("number format: float32, bfloat16 or float16; for gguf f32, f16, bf16 or q8_0", default=None,
                               default_text="as stored; for gguf f16")
    quant: Literal["q8_0", "q6_k", "q5_k_m", "q4_k_m"] | None = option(
        "quantise, q8_0 by the gguf package, the others by llama.cpp's own quantiser; the file is then opened, scored and "
        "continued in llama.cpp itself, where llama-cpp-python is installed", needs="--to gguf", default=None)
    text: str | None = option("calibration text; its last rows are used to judge the result", needs="--to gptq", metavar="FILE",
                              default=None)
    onto: Literal["trained", "file"] = option("with --to merged, for an adapter whose base was quantised in training (--base-dtype): "
                                              "merge into the quantised weights (trained), or into the base as its file holds it (file); "
                                              "the difference is then measured and reported", default="trained")
    base: str | None = option("base of an adapter that does not name its base", metavar="MODEL", default=None)
    json: bool = option("print verdicts as JSON", default=False)


EXAMPLES = """  assay export runs/a/checkpoints/step-000500 --to hf --out model --dtype bfloat16
  assay export runs/a/checkpoints/step-000500 --to gguf --out model-q8_0.gguf --dtype q8_0
  assay export runs/a/checkpoints/step-000500 --to gguf --out model-q4_k_m.gguf --quant q4_k_m
  assay export runs/a/checkpoints/step-000500 --to fp8 --out model-fp8
  assay export runs/a/checkpoints/step-000500 --to gptq --text wiki.txt --out model-gptq
  assay export ./adapter --base ./base --to merged --out ./merged
  assay export runs/nf4/adapter --to merged --onto file --out ./merged --dtype bfloat16"""


def remove_export(where: Path) -> None:
    if where.is_dir():
        shutil.rmtree(where)
    else:
        where.unlink(missing_ok=True)


def calibration_rows(source: "Artifact", text: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Calibration rows of the text's tokens: those that gptq is fitted to, and the last eighth, on which it is judged."""
    from assay.editing.moments import read_text
    from assay.errors import UsageError
    from assay.store.llm_compressor import require_llm_compressor

    require_llm_compressor()
    if source.tokenizer is None:
        raise UsageError(f"{source.path} has no tokenizer, which --text needs; add tokenizer.json")
    length = min(_ROW_TOKENS, source.config.max_length)
    rows = [list(row) for row in read_text(text, source.tokenizer, _MOST_ROWS * length, length=length).rows if len(row) == length]
    if len(rows) < _LEAST_ROWS:
        raise UsageError(f"{text} has {len(rows)} rows of {length} tokens; expected {_LEAST_ROWS} at least (up to {_MOST_ROWS} are used): "
                         "give more text, in longer documents")
    return rows[:-(len(rows) // 8)], rows[-(len(rows) // 8):]


def check_source(source: "Artifact") -> list[Verdict]:
    """Whether a checkpoint of Assay's that is exported was proven itself: its export is only shown to be the same."""
    checkpoint = source.raw.checkpoint
    if checkpoint is None or checkpoint.hallmark is not None:
        return []
    return [unproven("checkpoint", f"{source.path}, of which this is made, has no hallmark: nothing has proven it; run assay prove "
                                   f"{source.path}, and export it again")]


def run(flags: FLAGS) -> int:
    from assay.errors import UsageError
    from assay.guard.base_difference import base_difference
    from assay.guard.compressed_checks import check_compressed
    from assay.guard.llama_cpp_checks import check_in_llama_cpp
    from assay.guard.proof import ProofRequest, hallmark_or_quarantine, prove
    from assay.store.artifact import open_artifact, refuse_quarantined
    from assay.store.checkpoint import open_checkpoint
    from assay.store.compressed_tensors import COMPRESSED
    from assay.store.export_artifact import export_artifact
    from assay.verbs.prove import exit_code, print_proof

    if flags.quant is not None and (flags.to != "gguf" or flags.dtype is not None):
        raise UsageError("--quant is for --to gguf, in the place of --dtype; leave one of them out")
    if (flags.text is None) != (flags.to != "gptq"):
        raise UsageError("--text is what --to gptq is fitted to: give both, or neither")
    source = refuse_quarantined(open_artifact(flags.path, base=flags.base))
    where, stated = Path(flags.out), check_source(source)
    fitted, held_out = calibration_rows(source, Path(flags.text)) if flags.text else (None, None)
    rebased: dict[str, Any] | None = None
    if flags.onto == "file":
        if flags.to != "merged" or source.base is None or source.base.held is None:
            raise UsageError("--onto file is for --to merged, of an adapter whose base was held in few bits when it was trained "
                             "(--base-dtype); leave it out")
        on_file = open_artifact(flags.path, base=flags.base, held="file")
        found = base_difference(source, on_file)
        rebased = {"trained_on": source.base.held, "merged_into": on_file.base.digest if on_file.base else None, **found._asdict()}
        stated += [unproven("as trained", f"merged into {source.base.path.name} as its file holds it, and not in {source.base.held}, which "
                                         f"it was trained on: {found}", optional=True, **found._asdict())]
        source = on_file
    bound = export_artifact(source, flags.to, where, flags.quant or flags.dtype, rebased, fitted)
    base = flags.base if flags.to == "peft" else None
    try:
        verdicts = stated + prove(ProofRequest(str(where), str(source.path), base, "same", bound, against_base=flags.base))
        if flags.to == "gguf" and overall(verdicts) is not Outcome.REFUTED:
            verdicts += check_in_llama_cpp(where, source)
        if (flags.to in COMPRESSED or held_out) and overall(verdicts) is not Outcome.REFUTED:
            verdicts += check_compressed(where, source, held_out)
    except BaseException:  # refused or interrupted: what nobody has proven does not stay
        remove_export(where)
        raise
    if flags.to != "gguf":
        hallmark_or_quarantine(open_checkpoint(where), verdicts)
    outcome = print_proof(where, verdicts, as_json=flags.json)
    if outcome is Outcome.REFUTED and flags.to == "gguf":
        where.rename(where.with_name(where.name + ".refuted"))  # a GGUF file has no room for a quarantine note
    return exit_code(outcome)
