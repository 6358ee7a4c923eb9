"""Flexpress where others call attention: one module for each library. Each imports its library, so none is imported from here.

transformers, transformers_mask    models of Hugging Face, and the masks that they make
torch                              torch's own attention functions, by Flexpress's kernels
"""
