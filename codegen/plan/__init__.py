"""Which kernel a call gets and with what tile, from structure alone: one module for each kernel family.

candidates                                          the loop that chooses a kernel
geometry, slices, extras                            what cases are made of: strides, head dims, sinks, dropout and scales
roles                                               how gradients of captured tensors are gathered
tiles, backward_tiles, decode_tiles, hopper_tiles   tile sizes

forward, backward, tangent, decode               portable kernels
statistics, cached_statistics                    those that look at the probabilities
hopper_forward, hopper_backward, hopper_decode   kernels for Hopper
hopper_dots, hopper_elements                     what the forward one copies beside K and V
cpu, cpu_tangent, cpu_statistics, cpu_decode     kernels in C++
masks, cpu_masks                                 block masks, dense masks, mods on their own
update_cache, values_by_keys                     what writes a cache, or lays one out
as_bfloat16                                      float8 where products have 16 bits
shared_tables, shared_tiles                      what lays out steps of sequences that share pages
merge_parts, exchange                            parts of attention, and what ranks exchange
"""
