"""The native libraries on older CPUs, emulated: what is chosen there, and that float32 has the same bits."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bifolio.kernels import library

SCRIPT = Path(__file__).with_name("native_probe.py")


@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="qemu-user is not installed")
@pytest.mark.parametrize(("cpu", "isa"), [("Haswell", "avx2"), ("Nehalem", "generic")])
def test_the_same_libraries_run_on_an_older_cpu_with_the_same_float32_bits(cpu: str, isa: str) -> None:
    here = subprocess.check_output([sys.executable, "-P", str(SCRIPT)], text=True).split()
    emulated = ["qemu-x86_64", "-cpu", cpu, sys.executable, "-P", str(SCRIPT)]
    there, *refusals = subprocess.check_output(emulated, text=True, stderr=subprocess.DEVNULL).splitlines()
    assert there.split() == [isa, here[1]]
    assert len(refusals) == library.ISAS.index(isa)
    assert all("which this CPU does not have" in refusal for refusal in refusals)
