"""A call of attention, from its arguments to kernels and gradients. Begin with call.py.

call, arguments              a call from top to bottom; its tensors and masks as users pass them
autograd, derivatives        gradients; forward mode and second derivatives
problem, transformed, mapped  the same under transforms of torch.func
recorded                     calls that become operators
return_aux, probabilities    what is returned beside the output
packing, packed_blocks       where tokens of packed sequences belong, mods on their positions, their blocks
packed_call                  calls of packed sequences
merge                        attention from its parts
"""
