"""SSH signatures: a file is signed with an SSH key and verified offline, by OpenSSH's own ssh-keygen."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from assay.errors import ArtifactError, UsageError

SIGNED_AS = "assay-hallmark"  # the namespace: a signature made for mail or git does not count here
_PROGRAM = "ssh-keygen"
_KEY = re.compile(r"with (\S+ key SHA256:\S+)")


@dataclass(frozen=True)
class Signer:
    """Signer of a publication: the name that the allowed signers give the key; None where nobody was asked."""

    name: str | None
    key: str  # kind and fingerprint

    def __str__(self) -> str:
        return f"the {self.key}" if self.name is None else f"{self.name} (the {self.key})"


def ssh_keygen_installed() -> bool:
    return shutil.which(_PROGRAM) is not None


def sign_bytes(data: bytes, key: Path) -> bytes:
    """The signature, armoured. ssh-keygen asks for a passphrase itself, on the terminal; a public key is looked for in the SSH agent."""
    if not key.is_file():
        raise UsageError(f"{key}: no such file; expected an SSH key (ssh-keygen -t ed25519 makes one)")
    done = _ssh_keygen(["sign", "-f", str(key), "-n", SIGNED_AS], data)
    if done.returncode or not done.stdout.startswith(b"-----BEGIN SSH SIGNATURE-----"):
        raise UsageError(f"{key}: could not sign: {_last_words(done)}; expected an SSH key that can be used")
    return done.stdout


def require_signature(data: bytes, signature: Path, signers: Path | None = None) -> Signer:
    """Signer of these bytes. ArtifactError where the signature is not of them, or not by one of the allowed `signers`."""
    done = _ssh_keygen(["check-novalidate", "-n", SIGNED_AS, "-s", str(signature)], data)
    if done.returncode:
        raise ArtifactError(f"{signature}: is no signature of these bytes: {_last_words(done)}; get both from who signed")
    key = _key(done)
    return Signer(None, key) if signers is None else Signer(_allowed_name(data, signature, signers, key), key)


def _allowed_name(data: bytes, signature: Path, signers: Path, key: str) -> str:
    if not signers.is_file():
        raise UsageError(f"{signers}: no such file; expected lines of a name and a public key (man ssh-keygen, ALLOWED SIGNERS)")
    known = _ssh_keygen(["find-principals", "-s", str(signature), "-f", str(signers)], b"")
    names = known.stdout.decode(errors="backslashreplace").split()
    if known.returncode or not names:
        raise ArtifactError(f"{signature}: signed by another key: the {key}, which {signers} does not list")
    name = names[0].split(",")[0]
    done = _ssh_keygen(["verify", "-f", str(signers), "-I", name, "-n", SIGNED_AS, "-s", str(signature)], data)
    if done.returncode:
        raise ArtifactError(f"{signature}: {signers} lists {name}, but does not let the {key} sign this: {_last_words(done)}")
    return name


def _key(done: "subprocess.CompletedProcess[bytes]") -> str:
    found = _KEY.search((done.stdout + done.stderr).decode(errors="backslashreplace"))
    return found[1] if found else "key that ssh-keygen does not name"


def _ssh_keygen(words: list[str], data: bytes) -> "subprocess.CompletedProcess[bytes]":
    if not ssh_keygen_installed():
        raise UsageError(f"signatures are made and checked by {_PROGRAM}, which is not installed; install OpenSSH (openssh-client)")
    return subprocess.run([_PROGRAM, "-Y", *words], input=data, capture_output=True, check=False)


def _last_words(done: "subprocess.CompletedProcess[bytes]") -> str:
    lines = (done.stderr or done.stdout).decode(errors="backslashreplace").strip().splitlines()
    return lines[-1][:200] if lines else f"exit code {done.returncode}"
