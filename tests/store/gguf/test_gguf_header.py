"""The header reader: a damaged or hostile file is refused at once, and never crashes, hangs or is believed."""

import random
import struct
import time

import pytest

from assay.errors import ArtifactError, AssayError
from assay.store.gguf_header import read_gguf_header
from tests.store.gguf.gguf_files import made


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    made(path)
    return path


def refused(path, data):
    path.write_bytes(data)
    begun = time.process_time()
    with pytest.raises(ArtifactError) as caught:
        read_gguf_header(path)
    assert time.process_time() - begun < 2
    return str(caught.value)


def test_truncated_anywhere_is_refused(good, tmp_path):
    data = good.read_bytes()
    end = max(info.offset + info.bytes for info in read_gguf_header(good).tensors.values())
    for length in [*range(0, end, 397), end - 1]:
        refused(tmp_path / "cut.gguf", data[:length])
    (tmp_path / "whole.gguf").write_bytes(data[:end])  # the padding after the last tensor may be missing
    assert read_gguf_header(tmp_path / "whole.gguf") == read_gguf_header(good)


def test_appended_bytes_are_refused(good, tmp_path):
    assert "follow the last tensor" in refused(tmp_path / "long.gguf", good.read_bytes() + bytes(64))


@pytest.mark.parametrize(("place", "value", "words"), [
    (0, b"GGML", "does not begin with GGUF"),
    (4, struct.pack("<I", 1), "version 1"),
    (4, struct.pack(">I", 3), "little-endian"),
    (8, struct.pack("<Q", 2**60), "tensors"),
    (16, struct.pack("<Q", 2**40), "keys"),
    (24, struct.pack("<Q", 2**62), "text of"),
    (24, struct.pack("<Q", 900), "UTF-8"),
])
def test_absurd_numbers_are_refused(good, tmp_path, place, value, words):
    data = bytearray(good.read_bytes())
    data[place:place + len(value)] = value
    assert words in refused(tmp_path / "bad.gguf", bytes(data))


def table(good):
    """The file's bytes, and where in its table the first tensor's dimensions stand."""
    data = bytearray(good.read_bytes())
    name = next(iter(read_gguf_header(good).tensors)).encode()
    return data, data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)


def test_tensors_outside_the_file_or_over_each_other_are_refused(good, tmp_path):
    data, at = table(good)
    dimensions, rows = struct.unpack_from("<I", data, at)[0], at + 12
    offset = at + 4 + 8 * dimensions + 4
    for place, format, value, words in [
        (offset, "<Q", 2**50, "is due"), (offset, "<Q", 32, "is due"), (rows, "<Q", 2**40, "cut short"),
        (rows, "<Q", 0, "nothing"), (rows, "<Q", 8, "is due"), (at, "<I", 9, "dimensions"), (at, "<I", 0, "dimensions"),
    ]:
        broken = bytearray(data)
        struct.pack_into(format, broken, place, value)
        assert words in refused(tmp_path / "bad.gguf", bytes(broken))


def test_a_header_without_end_is_not_read(tmp_path):
    """A sparse terabyte whose one string claims most of it: refused without reading it."""
    path = tmp_path / "sparse.gguf"
    front = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<Q", 3) + b"key"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 70_000, 1))
    with path.open("r+b") as file:
        file.truncate(2**40)
    with pytest.raises(ArtifactError, match="70,000 tensors"):
        read_gguf_header(path)
    for value in (struct.pack("<IQ", 8, 2**39), struct.pack("<IQ", 8, 2**28), struct.pack("<IIQ", 9, 10, 2**36)):
        path.write_bytes(front + value)
        with path.open("r+b") as file:
            file.truncate(2**40)
        begun = time.process_time()
        with pytest.raises(ArtifactError, match="damaged"):
            read_gguf_header(path)
        assert time.process_time() - begun < 1


def test_mutations_never_crash_the_reader(good, tmp_path):
    """2,000 mutated headers: understood or refused, each in a blink."""
    data, at = table(good)
    chance, path, refusals = random.Random(7), tmp_path / "mutant.gguf", 0
    path.write_bytes(data)
    interesting = [bytes(8), b"\xff" * 8, struct.pack("<Q", 2**31), struct.pack("<I", 9), b"\x08", b"\x00"]
    for _ in range(2000):
        place = chance.choice([chance.randrange(2000), chance.randrange(at + 2000), at + chance.randrange(2000)])
        value = chance.choice([*interesting, chance.randbytes(chance.randint(1, 8))])
        with path.open("r+b") as file:
            file.seek(place)
            file.write(value)
        begun = time.process_time()
        try:
            read_gguf_header(path)
        except AssayError:
            refusals += 1
        assert time.process_time() - begun < 2
        with path.open("r+b") as file:
            file.seek(place)
            file.write(data[place:place + len(value)])
    assert refusals > 500


def test_folders_and_pipes_are_refused(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path, tmp_path / "pipe.gguf", tmp_path / "absent.gguf"):
        with pytest.raises(ArtifactError):
            read_gguf_header(path)
