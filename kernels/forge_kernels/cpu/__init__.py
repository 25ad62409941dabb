"""C++ kernels for CPUs: packed linear layers and paged attention, called by XLA.

`src/` has the kernels. `choice` measures which instruction set is the fastest on this machine,
`build` builds a library for it with the platform's compiler, and `library` loads it. The operations
that use the kernels are next to their references: `linear/cpu_ffi.py`, `attention/cpu_ffi.py`. If
the kernels are not available, plain XLA does the same, more slowly.
"""

from forge_kernels.cpu.build import BuildError
from forge_kernels.cpu.library import available, chosen, identity, load

__all__ = ["BuildError", "available", "chosen", "identity", "load"]
