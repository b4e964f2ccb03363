"""Memory of torch's tensors: which memory the next tensor gets, and giving it back to the system."""

from __future__ import annotations

import ctypes
import functools
import gc
from pathlib import Path

import torch

from benches import compiled


@functools.cache
def _functions() -> ctypes.CDLL:
    folder = Path(torch.__file__).parent
    libraries = folder / "lib"
    abi = int(torch.compiled_with_cxx11_abi())
    built_for = f'-DBUILT_FOR_TORCH="{torch.__version__}"'  # Another release is another file.
    flags = ("-std=c++20", "-O2", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", built_for, f"-I{folder / 'include'}")
    return compiled.load("tensor_memory.cpp", (*flags, f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10"))


def recycle() -> None:
    """Gives each tensor the memory of its size that was freed last, from now on; see `tensor_memory.cpp`.

    Raises:
        RuntimeError: there is no C++ compiler, or it refuses the source.
    """
    _functions().recycle_tensor_memory()


def give_back() -> None:
    """Gives freed memory back to the system, before the next tables are made."""
    gc.collect()
    _functions().release_tensor_memory()
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
