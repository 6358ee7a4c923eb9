"""The kernels of a call become a file of their own, which needs nothing of Flexpress.

kernels, hopper      which kernels
captures             what they capture
merged, torch_text   prints as one text, and a mod as statements of torch
file, cpp            what all such files say, and those in C++
attention, cpu       files of flex_attention
cached, cached_cpu   files of cached_attention
"""
