"""What a mod captures, and what it sees in its place.

stand_ins    what a mod sees instead of what it captures
program      the recorded steps and their guards
origins      where captured values come from, as Python
audit        what no stand-in can see: a function's bytecode
purity       what of libraries may be called again
randomness   random numbers, which are refused

tensors      which tensors kernels can read
levels       what transforms of torch.func put around tensors
watched      what hooks of saved tensors and dispatch modes see
"""
