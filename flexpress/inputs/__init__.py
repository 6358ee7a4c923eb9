"""What users pass, read and checked: one clear error for what is wrong.

checks                                tensors of a call, options, block sizes
cache_checks, packed_checks           those of caches, and of packed sequences
plain_arguments                       flags and devices
scales, sinks, dropout, float8        what changes the softmax, or elements, beside mods
"""
