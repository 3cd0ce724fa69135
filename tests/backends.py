"""The kernel backends of this machine. Importing it fails where the native libraries were not built: no test is
skipped."""

from __future__ import annotations

from bifolio.kernels import library

_built = library.built()
NATIVE = _built[_built.index(library.best()) :]  # those that this CPU runs, best first
BACKENDS = (*NATIVE, "torch")
