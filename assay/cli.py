"""The command line: one table, verb → module. A verb's module holds its flags, its examples and its `run`."""

import atexit
import contextlib
import errno
import gc
import importlib
import io
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType

from assay import __version__
from assay.config import nearest, parse
from assay.errors import AssayError, UsageError
from assay.store.bytecode_cache import keep_bytecode

# verb → what it does. `assay/verbs/VERB.py` is imported only when the verb is used: `assay --help` stays instant.
VERBS = {
    "tokenizer": "train a tokenizer: byte-level BPE or SentencePiece",
    "pretrain": "train a model from scratch",
    "data": "check, inspect, mix, split and deduplicate training data; shows which tokens are supervised",
    "sft": "fine-tune a model on conversations, the whole of it or a LoRA adapter",
    "dpo": "train on preference pairs: DPO, IPO, SimPO, ORPO and others",
    "kto": "train on single answers labelled desirable or undesirable (KTO)",
    "reward-model": "train a reward model on preference pairs, for assay grpo",
    "distill": "distil a teacher into a student, by its logits or by text that it writes",
    "grpo": "train a policy by reinforcement: GRPO and its variants, with rewards or environments",
    "plan": "estimate the memory, disk and step time of a run without loading a weight, and what would fit",
    "seeds": "run a recipe once per seed, and judge the seeds together",
    "corpus": "tokenise text into hashed shards for assay pretrain, with held-out documents",
    "pipeline": "run the stages of a YAML file, with gates between them, and show all of them on one page",
    "tiny": "make a tiny model and its data, to try the other verbs on a CPU",
    "demo": "build, save, prove, export and break a tiny model, on the CPU",
    "eval": "evaluate a model on a task, with a score per example and confidence intervals",
    "compare": "compare two or more evaluations: shown better, shown worse, or not shown",
    "probe": "sample from a model or an endpoint and look for degenerate text",
    "edit": "write new facts into a model's weights (MEMIT, ROME, AlphaEdit), and measure the effect",
    "merge": "merge fine-tunes of one model into one: linear, slerp, task vectors, TIES, DARE",
    "prune": "remove layers from a model: those with the least effect, or those that are named",
    "steer": "compute a steering vector from pairs of answers, and measure its effect and cost",
    "ttt": "test-time training: read documents in chunks, each scored before it is trained on",
    "trace": "record every site of the forward pass, and find where two models first diverge",
    "diff": "compare two models tensor by tensor",
    "bisect": "find the first bad checkpoint of a run",
    "serve": "serve a model and its adapters to OpenAI clients, on loopback unless a token is set",
    "report": "write the report of a run, one self-contained HTML page",
    "board": "show runs live in the browser: curves, verdicts, samples, GPUs, budget; stop a run after a save",
    "runs": "list runs with their outcomes",
    "track": "send a run's metrics to TensorBoard, W&B, trackio, MLflow or trainer_state.json",
    "inspect": "show what a checkpoint, folder or GGUF file holds: architecture, tensors, lineage, verdict",
    "prove": "prove a checkpoint, or what can be proven of a folder that another tool wrote",
    "export": "write a model as Hugging Face, PEFT, GGUF, merged or quantised, and prove it against the source",
    "publish": "upload a proven model with a model card, then download it again and verify it",
    "verify": "verify a downloaded model: hashes, hallmark and signature",
    "fetch": "download a model into the cache",
    "sample": "generate text from a model",
    "chat": "chat with a model, with its parent beside it on request",
    "zoo": "test the checks: plant every known silent failure and see it caught",
    "doctor": "show what is installed, what each missing part would enable, and what each GPU can train",
    "init": "ask three questions and write a commented YAML file of options for a recipe",
    "bench": "measure training and sampling on this machine beside transformers, on the same weights",
    "completion": "print a completion script for bash, zsh or fish",
}
EXIT_CODES = """exit codes: 0 done and proven · 1 runtime error · 2 usage · 3 a verdict went against it · 4 stopped by a guard
            130/143 interrupted, after a good save · 141 whoever read the output has left"""

# What the system may say of a path that is no fault of the program: the exit code, and what to do.
OUTSIDE = {errno.ENAMETOOLONG: (2, "give a shorter path"), errno.EACCES: (2, "check its permissions, or choose another path"),
           errno.EPERM: (2, "check its permissions, or choose another path"), errno.EROFS: (1, "choose a place that can be written to"),
           errno.ENOSPC: (1, "make room on the disk"), errno.EDQUOT: (1, "make room on the disk"), errno.EIO: (1, "check the disk")}

# Imports make a million objects that stay: to look through them for garbage after every 700 takes a fifth of their time.
RARELY = 20_000, 20, 20

NO_MEMORY = ("OutOfMemoryError", "MemoryError", "can't allocate memory", "CUDA out of memory")  # of a GPU, and of the machine


def main(argv: Sequence[str] | None = None) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr has it: a letter that the terminal lacks ends no run
    signal.signal(signal.SIGTERM, _terminate)
    gc.set_threshold(*RARELY)
    keep_bytecode()
    ended = list[int]()
    if argv is None:
        atexit.register(_leave, ended)  # the first that is registered is called last
        _let_processes_go(sys.argv[1:])
    ended.append(run(list(sys.argv[1:] if argv is None else argv)))
    sys.exit(ended[0])


def _leave(ended: list[int]) -> None:
    """The last act of the program, when its threads have ended and everybody who wished to was called: to take 3,000 modules and a GPU's
    context apart takes seconds and changes nothing. Where it ends by an error of ours, or an output cannot be flushed, Python does it."""
    if ended and "torch" in sys.modules:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(ended[0])


def _let_processes_go(argv: Sequence[str]) -> None:
    """The program ends with its verb: it kills the proving processes, and need not wait until they are gone."""
    if argv and argv[0] in {*_RECIPES, "prove"}:
        from assay.guard.proving_process import PROVING_PROCESSES

        PROVING_PROCESSES.ends_with_program = True


class Terminated(KeyboardInterrupt):
    """SIGTERM unwinds as Ctrl-C does, so that what is half made is taken away. Runs that can save first listen for it themselves."""


def _terminate(_: int, __: FrameType | None) -> None:
    raise Terminated


def run(argv: list[str]) -> int:
    """Errors of ours are sentences on stderr; anything else is a bug and keeps its traceback."""
    try:
        code = _dispatch(argv)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where what the disk or the reader says of it is heard
        return code
    except AssayError as error:
        print(f"assay: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as stop:
        print("assay: interrupted", file=sys.stderr)
        return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)
    except BrokenPipeError:  # `assay … | head`: the reader has left, which needs no words; but a run that it ended is not done
        _print_nothing_more()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in OUTSIDE:
            raise
        if error.filename is None:
            _print_nothing_more()
        print(f"assay: {str(error.filename or 'what is printed')[:200]}: {error.strerror}; {OUTSIDE[error.errno][1]}", file=sys.stderr)
        return OUTSIDE[error.errno][0]
    except (MemoryError, RuntimeError) as error:
        if not any(sign in f"{type(error).__name__}: {error}" for sign in NO_MEMORY):
            raise
        print(f"assay: {'. '.join(str(error).split('. ')[:3]) or 'no memory is left'}: let less go through the model at a time "
              "(--micro-batch-size, --micro-batch-tokens, --batch-size), or end what else takes memory; a run goes on from its last "
              "checkpoint", file=sys.stderr)
        return 1


def _print_nothing_more() -> None:
    """Discard what is still in the output buffer, instead of failing once more when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if argv else UsageError.exit_code
    if argv[0] in ("-V", "--version"):
        print(f"assay {__version__}")
        return 0
    verb, rest = argv[0], argv[1:]
    if verb not in VERBS:
        raise UsageError(f"unknown verb {verb!r}{nearest(verb, VERBS)} (see assay --help)")
    module = importlib.import_module(f"assay.verbs.{verb.replace('-', '_')}")
    try:
        flags = parse(module.FLAGS, rest, prog=f"assay {verb}", examples=module.EXAMPLES, config_file=verb in _RECIPES)
    except SystemExit as done:  # argparse ends the process after --help
        return int(done.code or 0)
    if getattr(flags, "gpus", 1) > 1 and "WORLD_SIZE" not in os.environ:
        from assay.recipes.processes import launch_processes, shards_for

        return launch_processes([*argv, *shards_for(flags)], flags.gpus)
    from assay.store.scratch import sweep_scratch

    sweep_scratch()
    with _proofs_ready(verb, getattr(flags, "device", None)):
        return module.run(flags)


@contextlib.contextmanager
def _proofs_ready(verb: str, device: str | None) -> Iterator[None]:
    """Start the proving processes early, for a verb that saves: they import what they need while the verb imports and opens its own."""
    if verb not in _RECIPES - {"ttt"} or os.environ.get("RANK", "0") != "0":
        yield
        return
    from assay.guard.proving_process import PROVING_PROCESSES, WHERE_THERE_IS_ONE, processes_early, proof_threads

    with PROVING_PROCESSES.keeping():
        PROVING_PROCESSES.start_early(proof_threads(beside=False), device or WHERE_THERE_IS_ONE, processes_early())
        yield


_RECIPES = {"pretrain", "sft", "dpo", "kto", "reward-model", "distill", "grpo", "edit", "ttt"}  # verbs that also take --config FILE.yaml


def _help() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:{width}}  {what}" for verb, what in VERBS.items())
    return (f"assay {__version__}: trains and evaluates language models, and proves every artifact it hands over\n\n"
            f"usage: assay VERB … [--json]      assay VERB --help shows its flags with examples\n\n{verbs}\n\n{EXIT_CODES}")
