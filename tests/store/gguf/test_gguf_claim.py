"""A GGUF file is written under a name that is held: what is synced is what is renamed."""

import os
from pathlib import Path

from assay.store.durable import new_file
from tests.store.disks import Watched, installed


def test_a_writer_whosenew_file_was_swept_takes_another(tmp_path: Path):
    """The one moment in which the file has no lock yet: written by its name alone, another file would be synced than is kept."""
    taken: list[bool] = []

    def sweep_before_the_first_lock(name, operation, *arguments):
        if name == "lock" and not taken:
            taken.append(True)
            for path in tmp_path.iterdir():
                os.unlink(path)
        return operation(*arguments)

    with installed(Watched(sweep_before_the_first_lock)), new_file(tmp_path / "model.gguf") as temporary:
        assert temporary.exists()
        temporary.write_bytes(b"GGUF")
    assert taken
    assert os.listdir(tmp_path) == ["model.gguf"]
    assert (tmp_path / "model.gguf").read_bytes() == b"GGUF"
