"""The machine: the cache on disk, compiling, loading, launching, the interpreter.

kernel             a kernel ready to launch
arguments          what a launch hands over
tma                descriptors of tensors
memory, counters   what kernels write to, and count on
devices            what a device is
streams            what one stream makes for others

cache              printed kernels on disk and in memory
folder, contents   the folder that holds them, and what lies in it
binary             compiled kernels on disk
stages             Triton's compiler, stage by stage
compiler           the same in this process
workers, cores     in processes beside this one, and how many
offline            for GPUs that are not there
cuda               NVIDIA's driver

cpp                       kernels in C++
cpp_compiler, cpp_build   the system's compiler, and one run of it

interpret       running a print on a CPU
switching       triton.language, switched to the interpreter and back
interpreter_*   what of Triton's interpreter is done otherwise: patches, operands, types, numbers, and direct operations
"""
