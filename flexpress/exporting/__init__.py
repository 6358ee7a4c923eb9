"""Kernels in a file of their own.

export, export_cached    the files of a call, and of one over a cache
exported_files           what they have in common
"""
