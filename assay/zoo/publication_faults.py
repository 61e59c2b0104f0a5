"""Publication faults: a file changed after publishing, code that nobody published, and signatures of another folder or by another key."""

import shutil
import subprocess
from pathlib import Path

from assay.guard.publication_checks import check_published
from assay.interop.publishing import PublishRequest, publish
from assay.store.checkpoint import CARD, PUBLICATION, SIGNATURE, write_hallmark
from assay.store.ssh_signature import sign_bytes, ssh_keygen_installed
from assay.testing.fault_injection import Plant, fault, on_disk
from assay.testing.tiny_models import WEIGHTS_FILE, flip_bit, save_model, tiny_model
from assay.verdict import Verdict, proven

SIGNER, KEY, STRANGER = "maker@lab", "maker", "stranger"


def a_publication(folder: Path, plant: Plant) -> list[Verdict]:
    """Signed, and verified by whoever downloaded it, who knows the maker's key; struck in between."""
    for name in (KEY, STRANGER):
        make_ssh_key(folder / name)
    for seed, name in enumerate(("published", "other")):
        source = save_model(folder / f"{name} source", tiny_model(seed=seed))
        write_hallmark(source, [proven("whole", "every file is there")])
        publish(PublishRequest(source.folder, str(folder / name), key=folder / KEY))
    signers = allowed_signers(folder / "allowed_signers", folder / KEY)
    with plant(folder / "published"):
        return check_published(folder / "published", signers)


def make_ssh_key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", path.name, "-f", str(path)], check=True)
    return path


def allowed_signers(path: Path, key: Path) -> Path:
    path.write_text(f"{SIGNER} {key.with_name(f'{key.name}.pub').read_text()}")
    return path


def sign_as_a_stranger(folder: Path) -> None:
    (folder / SIGNATURE).write_bytes(sign_bytes((folder / PUBLICATION).read_bytes(), folder.parent / STRANGER))


def take_from_another(*names: str) -> Plant:
    return on_disk(lambda folder: [shutil.copyfile(folder.parent / "other" / name, folder / name) for name in names])


if ssh_keygen_installed():
    fault("weights changed after publishing", rows=("C03",), stage="publish", check="files", job=a_publication)(
        on_disk(lambda folder: flip_bit(folder / WEIGHTS_FILE, -1001)))
    fault("model card changed after publishing", rows=("C03",), stage="publish", check="publication", job=a_publication)(
        on_disk(lambda folder: flip_bit(folder / CARD, 200, bit=0)))
    fault("publication of another folder", rows=("C03",), stage="publish", check="publication", job=a_publication)(
        take_from_another(PUBLICATION, SIGNATURE))
    fault("signature of another folder", rows=("C03",), stage="publish", check="signature", job=a_publication)(take_from_another(SIGNATURE))
    fault("signed by another key", rows=("C03",), stage="publish", check="signature", job=a_publication)(on_disk(sign_as_a_stranger))
