"""C++ kernels for CPUs: packed linear layers and paged attention, called by XLA.

`src/` holds the kernels, `choice` measures which instruction set is the fastest here, `build` makes
a library for it with the platform's compiler, `library` loads it. The operations that use them are
files beside their references: `linear/cpu_ffi.py`, `attention/cpu_ffi.py`. Where the kernels cannot
be had, the plain XLA forms do the same, slower.
"""

from forge_kernels.cpu.build import BuildError
from forge_kernels.cpu.library import available, chosen, identity, load

__all__ = ["BuildError", "available", "chosen", "identity", "load"]
