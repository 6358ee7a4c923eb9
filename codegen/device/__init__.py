"""The machine: the cache on disk, compiling, loading, launching, the interpreter."""
