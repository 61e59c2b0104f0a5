"""A squeezed file is as small as asked, as fine as fits, holds the model that went in, and is refused where it does not."""

import copy
import errno
import hashlib
import math
import zlib
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from assay.errors import ArtifactError, StoreError, UsageError
from assay.model.families import parameter_shapes
from assay.model.transformer import initialised
from assay.seeds import generator
from assay.store import assayz as format
from assay.store.assayz import (
    ASSAYZ_MAGIC,
    COARSEST,
    FINEST,
    SqueezeSource,
    levels_of,
    most_assayz_bytes,
    read_assayz,
    rounded_rows,
    steps_of,
    unrounded,
    write_assayz,
)
from assay.store.sealed import seal, unseal
from assay.testing.tiny_models import tiny_config, tiny_tokenizer
from tests.store.disks import Failing, Watched, installed

TOKENIZER = tiny_tokenizer()


def model(config, tensors=None):
    """Opened artifact as far as squeeze reads it."""
    if tensors is None:
        tensors = {name: p.detach() for name, p in initialised(config, 0).named_parameters()}
    return SimpleNamespace(path="model", config=config, tensors=tensors, tokenizer=TOKENIZER, patch=None, digest="d" * 64)


def normal(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=generator(seed, "weights")).numpy()


def entropy(codes):
    counts = np.bincount(codes.reshape(-1).astype(np.int64) + 128)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.assayz"
    write_assayz(model(tiny_config("llama")), path, 10**9)
    return path


# ---------------------------------------------------------------- rounding


@pytest.mark.parametrize(("levels", "bits"), [(127, 7.06), (31, 5.05), (15, 4.02)])
def test_normal_weights_take_the_entropy_of_their_codes_and_one_percent(levels, bits):
    codes = rounded_rows(normal(2048, 448), levels).codes
    coded = 8 * len(format._deflated(codes.tobytes())) / codes.size
    assert coded < 1.012 * entropy(codes)
    assert coded < bits
    assert entropy(codes) > math.log2(levels) - 0.06  # none of the precision that was asked for is thrown away


def test_no_weight_is_off_by_more_than_half_a_step():
    matrix = normal(64, 300) * np.exp(1.5 * normal(64, 1, seed=1))
    for levels in (127, 60, 15):
        found = rounded_rows(matrix, levels)
        steps = steps_of(found.step_codes, found.unit)
        off = np.abs(unrounded(found.codes, steps) - matrix).max(1)
        reached = np.abs(matrix).max(1) <= 127.5 * steps
        assert reached.mean() == 1 if levels < 100 else reached.mean() > 0.5
        assert (off[reached] <= 0.5001 * steps[reached]).all()
        wanted = 4 * np.sqrt((matrix.astype(np.float64) ** 2).mean(1)) / levels
        assert (steps <= 1.045 * np.maximum(wanted, np.abs(matrix).max(1) / 127)).all()


def test_a_large_weight_among_small_ones_keeps_its_value_where_codes_reach_it():
    matrix = normal(1, 4000)
    matrix[0, 7] = 12.0
    found = rounded_rows(matrix, 31)
    assert abs(unrounded(found.codes, steps_of(found.step_codes, found.unit))[0, 7] - 12) < 0.1


def test_where_codes_do_not_reach_cutting_off_loses_less_than_coarse_steps():
    matrix = normal(1, 40_000)
    matrix[0, 7] = 30.0
    found = rounded_rows(matrix, 127)
    error = np.square(unrounded(found.codes, steps_of(found.step_codes, found.unit)) - matrix).sum()
    plain = np.abs(matrix).max() / 127
    assert error < 0.95 * np.square(np.rint(matrix / plain) * plain - matrix).sum()


def test_rows_of_zeros_stay_zero():
    matrix = normal(4, 32)
    matrix[2] = 0
    for given in (matrix, np.zeros((3, 8), np.float32)):
        found = rounded_rows(given, 31)
        values = unrounded(found.codes, steps_of(found.step_codes, found.unit))
        assert (values[~given.any(1)] == 0).all()
        assert np.isfinite(values).all()


# ---------------------------------------------------------------- what is written is what is read


@pytest.mark.parametrize("family", ["llama", "llama3", "mistral", "qwen2", "qwen3", "gpt2", "assay", "mixed"])
def test_the_model_comes_back_as_it_was_rounded(tmp_path, family):
    source = model(tiny_config(family))
    report = write_assayz(source, tmp_path / "m", 10**9)
    found = read_assayz(tmp_path / "m")
    assert found.config == source.config
    assert (found.tokenizer.digest, found.tokenizer.settings, found.tokenizer.templates) == (
        TOKENIZER.digest, TOKENIZER.settings, TOKENIZER.templates)
    assert list(found.tensors) == list(parameter_shapes(source.config))
    assert (found.facts["levels"], found.facts["source"], report.levels) == (FINEST, source.digest, FINEST)
    assert report.bytes == (tmp_path / "m").stat().st_size
    for name, tensor in found.tensors.items():
        if tensor.dim() == 2:
            one = rounded_rows(source.tensors[name].numpy(), levels_of(name, FINEST))
            assert np.array_equal(tensor.numpy(), unrounded(one.codes, steps_of(one.step_codes, one.unit)))
            assert (tensor - source.tensors[name]).norm() < 0.011 * source.tensors[name].norm()
        else:
            assert torch.equal(tensor, source.tensors[name].half().float())


def test_the_finest_precision_that_fits_is_taken(tmp_path):
    source = model(tiny_config("llama"))
    taken = []
    for max_bytes in (10**9, 70_000, 60_000, 50_000):
        report = write_assayz(source, tmp_path / "m", max_bytes)
        assert report.bytes <= max_bytes
        taken.append(report.levels)
        again = SqueezeSource(source, TOKENIZER)
        assert (tmp_path / "m").read_bytes() == again.file(report.levels, again.sections(report.levels))
        if report.levels < FINEST:
            assert len(again.file(report.levels + 1, again.sections(report.levels + 1))) > max_bytes
    assert taken == sorted(taken, reverse=True)
    assert taken[0] == FINEST
    assert COARSEST < taken[-1] < taken[1] < FINEST


@pytest.mark.parametrize("kept", [1.0, 0.5, 0.05])
def test_the_search_is_short_whatever_share_of_the_weights_is_zero(kept, monkeypatch):
    """Where most are, twice the levels take far less than a bit more a weight, and what is left of the bytes says little."""
    config, draw = tiny_config("llama"), generator(1)
    tensors = {name: p.detach() * (torch.rand(p.shape, generator=draw) < kept) for name, p in initialised(config, 0).named_parameters()}
    source, sized, sections = SqueezeSource(model(config, tensors), TOKENIZER), [], SqueezeSource.sections
    monkeypatch.setattr(source, "sections", lambda levels: (sized.append(levels), sections(source, levels))[1])
    least, most = (len(source.file(levels, source.sections(levels))) for levels in (COARSEST, FINEST))
    for max_bytes in range(least, most, (most - least) // 5):
        sized.clear()
        levels, _ = format._finest_that_fits(source, max_bytes)
        assert len(sized) <= 14
        assert len(source.file(levels, sections(source, levels))) <= max_bytes


def test_tables_are_a_bit_finer(tmp_path):
    report = write_assayz(model(tiny_config("llama")), tmp_path / "m", 55_000)
    assert report.levels < 63
    assert 0.7 < report.bits["tables"] - report.bits["matrices"] < 1.2


def test_twenty_two_million_parameters_fit_into_sixteen_million_bytes_at_int6():
    """8 layers of width 448 and 8,192 tokens. Measured: 0.650 bytes a parameter with everything that belongs to it."""
    config = replace(tiny_config("qwen3", vocab=8192), width=448, depth=8, heads=7, kv_heads=7, head_dim=64, hidden=1216,
                     windows=(None,) * 8)
    source = SqueezeSource(model(config), TOKENIZER)
    parameters = sum(tensor.numel() for tensor in source.artifact.tensors.values())
    size = len(source.file(31, source.sections(31)))
    assert parameters > 22_000_000
    assert size < 16_000_000
    assert 0.645 < size / parameters < 0.653


@pytest.mark.parametrize("kind", ["normal", "uniform", "heavy", "two values", "one row outweighs"])
def test_no_weights_take_more_than_what_was_promised_before_training(kind):
    config = replace(tiny_config("qwen3", vocab=4096), width=256, hidden=512)
    tensors = {name: p.detach().clone() for name, p in initialised(config, 0).named_parameters()}
    for tensor in tensors.values():
        if tensor.dim() == 2:
            tensor.copy_({"normal": tensor, "uniform": torch.rand(tensor.shape, generator=generator(1)) - 0.5,
                          "heavy": tensor.sign() * torch.expm1(80 * tensor.abs()), "two values": tensor.sign(),
                          "one row outweighs": tensor * torch.tensor([1e4] + [1.0] * (len(tensor) - 1))[:, None]}[kind])
    source = SqueezeSource(model(config, tensors), TOKENIZER)
    size, most = len(source.file(COARSEST, source.sections(COARSEST))), most_assayz_bytes(config, TOKENIZER)
    assert size <= most
    if kind == "normal":
        assert size > 0.97 * most  # and a promise that refuses good models is none


def test_what_does_not_fit_is_refused_with_what_would(tmp_path):
    with pytest.raises(UsageError, match=r"at int5 it takes 46,358 bytes, and at most 42,000 are allowed; that is room for about "
                                         r"[\d,]+ of its 81,920 weights: 1 layers instead of 2 or a vocabulary of 199 instead of 320"):
        write_assayz(model(tiny_config("llama")), tmp_path / "m", 42_000)
    assert not (tmp_path / "m").exists()


def test_what_cannot_be_squeezed_is_refused(tmp_path):
    source, broken = model(tiny_config("llama")), model(tiny_config("llama"))
    broken.tensors["blocks.1.mlp.down.weight"] = broken.tensors["blocks.1.mlp.down.weight"].clone()
    broken.tensors["blocks.1.mlp.down.weight"][3, 3] = math.nan
    large = model(tiny_config("llama"), source.tensors | {"norm.weight": torch.full((64,), 1e5)})
    for given, error, sentence in (
            (broken, ArtifactError, "not finite"), (large, UsageError, "beyond 65,504"),
            (SimpleNamespace(**vars(source) | {"patch": object()}), UsageError, "is an adapter"),
            (SimpleNamespace(**vars(source) | {"tokenizer": None}), UsageError, "carries its tokenizer")):
        with pytest.raises(error, match=sentence):
            write_assayz(given, tmp_path / "m", 10**9)
    assert not (tmp_path / "m").exists()


def test_a_failing_disk_leaves_the_file_that_was_there(file):
    before = file.read_bytes()
    other = model(tiny_config("llama"), {name: 2 * t for name, t in model(tiny_config("llama")).tensors.items()})
    at = 0
    while file.read_bytes() == before:  # until the rename was done and only its fsync fails: then the new one is whole
        at += 1
        with installed(Watched(Failing(at, errno.ENOSPC, lasting=1000))), pytest.raises(StoreError):
            write_assayz(other, file, 10**9)
    assert at > 4
    assert torch.equal(read_assayz(file).tensors["norm.weight"], 2 * torch.ones(64))


# ---------------------------------------------------------------- what is not as it was written is refused


def test_every_flipped_bit_is_refused(file):
    data = file.read_bytes()
    _, body = format._read_header(data, "")
    start = len(data) - len(body)
    places = [*range(0, start, 5), *range(start - 2, start + 8), *range(start, len(data), 977), len(data) - 1]
    for at in places:
        file.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1:])
        with pytest.raises(ArtifactError):
            read_assayz(file)


@pytest.mark.parametrize("change", [lambda d: d[:-1], lambda d: d + b"\0", lambda d: d[:100], lambda d: b"", lambda d: ASSAYZ_MAGIC,
                                    lambda d: ASSAYZ_MAGIC + b"\xff\xff\xff\xff" + d[12:], lambda d: b"PK" + d[2:]])
def test_truncated_lengthened_and_foreign_files_are_refused(file, change):
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ArtifactError):
        read_assayz(file)


def rewritten(file, change):
    """Somebody who knows the format writes another header and other sections, and seals them properly."""
    header, body = format._read_header(file.read_bytes(), "")
    sections, start = {}, 0
    for name in format.SECTIONS:
        sections[name] = bytes(body[start:start + header["sections"][name]["bytes"]])
        start += len(sections[name])
    header = copy.deepcopy(header)
    change(header, sections)
    for name, data in sections.items():
        if isinstance(header["sections"].get(name), dict):
            header["sections"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    text = seal(header, where="")
    file.write_bytes(ASSAYZ_MAGIC + len(text).to_bytes(4, "little") + text + b"".join(sections.values()))


def test_a_rewritten_file_that_is_well_formed_is_read(file):
    rewritten(file, lambda header, sections: header.update(levels=64))
    assert read_assayz(file).facts["levels"] == 64


def bomb(size):
    coder = zlib.compressobj(9, zlib.DEFLATED, -15)
    return coder.compress(bytes(size)) + coder.flush()


GEOMETRIES = {
    "huge": {"vocab": 2**40}, "too deep": {"depth": 10**9, "windows": []}, "no heads": {"heads": 0}, "uneven heads": {"kv_heads": 3},
    "a word": {"width": "wide"}, "a truth": {"width": True}, "negative": {"hidden": -96}, "no windows": {"windows": None},
    "one window": {"windows": [None]}, "odd windows": {"windows": [None, "x"]}, "a list": {"family": []}, "no such family": {"family": "x"},
    "unknown": {"more": 1}, "rope of nothing": {"rope": {}}, "linear rope": {"rope": {"base": 1e4, "kind": "linear"}},
    "flat rope": {"rope": 3}, "zero rope": {"rope": {"base": 0.0}}, "no norm": {"norm": "none"}, "other shape": {"width": 32},
    "large but allowed": {"vocab": 2**24, "width": 2**12}, "nothing": None}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_hostile_geometry_is_refused_before_anything_is_made_of_it(file, name):
    change = GEOMETRIES[name]

    def plant(header, sections):
        header["geometry"] = {} if change is None else header["geometry"] | change

    rewritten(file, plant)
    with pytest.raises(ArtifactError, match=r"geometry|less than a bit|asks for|does not end|architecture|unknown option"):
        read_assayz(file)


def test_more_layers_than_any_model_has_are_not_built(file):
    rewritten(file, lambda header, sections: header["geometry"].update(depth=1025, windows=[None] * 1025))
    with pytest.raises(ArtifactError, match="up to 1024 layers"):
        read_assayz(file)


def flipped_tokenizer(header, sections):
    other = tiny_tokenizer(template=False)
    other.document["model"]["merges"].pop()
    sections["tokenizer"] = format._packed_tokenizer(other)


@pytest.mark.parametrize(("plant", "sentence"), [
    (lambda header, sections: sections.update(matrices=bomb(10**7)), "does not end"),
    (lambda header, sections: sections.update(matrices=bomb(49152)), "less than a bit each"),
    (lambda header, sections: sections.update(tokenizer=b"\xfd7zXZ" + bytes(64)), "cannot be decompressed"),
    (lambda header, sections: sections.update(tables=sections["tables"][:-5]), "does not end"),
    (lambda header, sections: sections.update(tables=sections["tables"] + b"more"), "does not end"),
    (lambda header, sections: sections.update(steps=format._deflated(bytes(range(256)) * 4)), "the geometry asks for"),
    (lambda header, sections: sections.pop("steps"), "follow the header"),
    (lambda header, sections: header["sections"].pop("steps"), "sections"),
    (lambda header, sections: header["sections"].update(steps=3), "expected a JSON object"),
    (lambda header, sections: header.update(format=2), "format"),
    (lambda header, sections: header.update(levels=0), "levels"),
    (lambda header, sections: header.update(more=1), "more"),
    (lambda header, sections: header.pop("source"), "source"),
    (flipped_tokenizer, "its header names another"),
])
def test_hostile_sections_are_refused(file, plant, sentence):
    rewritten(file, plant)
    with pytest.raises(ArtifactError, match=sentence):
        read_assayz(file)


def test_steps_that_are_no_numbers_are_refused(file):
    def plant(header, sections):
        raw = bytearray(zlib.decompress(sections["steps"], -15))
        raw[:4] = np.float32(np.nan).tobytes()
        sections["steps"] = format._deflated(bytes(raw))

    rewritten(file, plant)
    with pytest.raises(ArtifactError, match="positive number"):
        read_assayz(file)


def test_a_file_of_another_kind_names_itself(tmp_path):
    (tmp_path / "m").write_bytes(unseal.__doc__.encode())
    with pytest.raises(ArtifactError, match="does not begin as a squeezed model"):
        read_assayz(tmp_path / "m")
