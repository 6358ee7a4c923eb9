"""Attention over caches, and what writes them.

cached, cached_arguments, cached_problem    cached_attention, its arguments, checked
cached_calls, cached_mods                   how kernels take it; mods of positions
cached_probabilities, cached_prepare        what return_aux tells of it; its kernels compiled ahead
kv_cache, rope, rotation                    writing a cache, turning by positions
pages, splits                               pages of sequences, keys in parts
shared_prefix, shared_attention             sequences that begin with the same pages
"""
