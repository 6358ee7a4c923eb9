"""A call's tensors become a plan, arguments and outputs.

call                           a call as drivers take it
launch                         launching one kernel
meanwhile                      what serves while a faster kernel is compiled
layouts, workspace, profiled   outputs in memory, memory for a call, names in profiles

forward, forward_kernels        a forward pass, and the kernels for it
backward, backward_kernels      a backward pass
captured                        gradients of captured tensors
tangent                         forward mode and second derivatives
statistics                      what return_aux tells of the probabilities
decode, decode_kernels          few queries
cpu, cpu_backward, cpu_decode   kernels in C++ for these

masks, block_grid           block masks and dense masks
block_lists, status_lists   lists of blocks
evaluated_masks             the same by torch, while kernels compile
evaluate                    a mod on its own

cached, cached_call                         a call over a cache
prefill, cached_statistics                  long queries there; what return_aux tells
shared_parts, shared_tables, shared_tiles   sequences that begin with the same pages
update_cache, values_by_keys                what writes a cache, or lays one out
as_bfloat16                                 float8 where products have 16 bits
merge_parts, exchange                       parts of attention, and what ranks exchange

imagined                    a call that nobody makes
preview, preview_masks      its kernels
"""
