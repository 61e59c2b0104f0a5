"""Attack files of safetensors: the bytes in its Rust tests, and the abuse attempts of its attacks/ folder, beside the library's verdict."""

import ast
import json
import re
import tempfile
from pathlib import Path

from assay.errors import AssayError
from assay.store.safetensors_files import read_tensors
from tests.judges.score import Score, checkout, checkout_version, first_words, packages

ASKS = "is this malformed file refused, and what the library reads read with the same values?"


def judge(folder: Path) -> Score:
    source = checkout(folder, "safetensors", "safetensors", "src", "tensor.rs")
    score = Score(f"{packages('safetensors')}; {checkout_version(folder, 'safetensors', [source])}")
    files = rust_literals(source.read_text()) | abuse_attempts()
    with tempfile.TemporaryDirectory() as scratch:
        for name, data in files.items():
            try_bytes(score, name, data, Path(scratch) / "attack.safetensors")
    score.notes.append("attempt 2 of attacks/ with 100,000 tensors over the same bytes, not ten million; attempts at other formats "
                       "(pickle, npz, h5) have no reader here")
    return score


def try_bytes(score: Score, name: str, data: bytes, file: Path) -> None:
    from safetensors.torch import load

    file.write_bytes(data)
    try:
        theirs = load(data)
    except Exception:  # whatever the library raises, it did not read the file
        theirs = None
    try:
        ours = read_tensors(file)
    except AssayError as error:
        if theirs is None:
            score.right += 1
        else:
            score.refusals[f"{name}: {first_words(error).replace(str(file), '')}"] += 1
        return
    alike = theirs is not None and theirs.keys() == ours.keys() and all(
        tensor.dtype == ours[key].dtype and tensor.shape == ours[key].shape and tensor.equal(ours[key]) for key, tensor in theirs.items())
    score.agree(alike, name, f"we read {sorted(ours)[:3]}, the library {'refuses it' if theirs is None else sorted(theirs)[:3]}")


def rust_literals(source: str) -> dict[str, bytes]:
    """Every byte string that a test deserialises, by the test's name and its number there."""
    found = {}
    for test in re.finditer(r"fn (test_\w+)\(.*?(?=#\[test\]|\Z)", source, re.DOTALL):
        for number, literal in enumerate(re.findall(r'let serialized = (b"(?:[^"\\]|\\.)*");', test[0])):
            found[f"{test[1]} {number}"] = ast.literal_eval(literal.replace("\n", "\\n"))
    return found


def abuse_attempts() -> dict[str, bytes]:
    def file(header: dict[str, object], data: int, length: int | None = None) -> bytes:
        text = json.dumps(header).encode()
        return (length or len(text)).to_bytes(8, "little") + text + bytes(data)

    def over_same_bytes(count: int, shape: list[int]) -> dict[str, object]:
        size = 4 * shape[0] * shape[1]
        return {f"weight_{k}": {"dtype": "F32", "shape": shape, "data_offsets": [0, size]} for k in range(count)}

    one = over_same_bytes(1, [2, 2])
    attempts = {"abuse 1, a header of 1000 bytes announced": file(one, 16, 1000), "abuse 2": file(over_same_bytes(100_000, [2, 2]), 16),
                "abuse 3": file(over_same_bytes(1000, [200, 200]), 160_000), "JSON attack": file(over_same_bytes(10, [2, 2]), 16)}
    strange = {"negative offsets": [-16, 0], "offsets beyond the file": [0, 2**40], "offsets turned round": [16, 0], "a gap": [8, 24]}
    for name, offsets in strange.items():
        attempts[name] = file({"weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": offsets}}, 24)
    attempts["a shape that overflows"] = file({"weight": {"dtype": "F32", "shape": [2**32, 2**32], "data_offsets": [0, 0]}}, 0)
    attempts["sound"] = file(one, 16)
    return attempts
