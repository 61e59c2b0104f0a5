"""Triton's interpreter, whose language is patched once. By itself it patches every function of the language again whenever a kernel or
one of its helpers is called (a sum, a maximum), each time around the patch before."""

import os
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session", autouse=True)
def language_patched_once() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime import interpreter

    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    # the interpreter of Triton 3.6 asks numpy for int(array of one entry), which numpy refuses from 2.4 on
    tl.tensor.__index__ = lambda self: self.handle.data.item()
    interpreter._patch_lang = lambda fn: type(scope)()  # nothing to restore
