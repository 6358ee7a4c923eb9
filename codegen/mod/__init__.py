"""What a user's function means: traced, with what it captures, as an expression; its derivative, its bounds.

The graph

expr         nodes, graphs, and what they capture
dtypes       in which dtype an operation computes
compute      expressions computed with torch
loads        what a mod loads
graph_mod    a graph in place of a function
graph_text   graphs as texts
folded       mods of many calls as one
scaled       a score_mod times one more captured tensor
rewriting    nodes that are made of a graph's
integers     how large integers of a mod may be
wide         arithmetic of indices that leaves int32
errors       what goes wrong

The op table

op               what a row says
ops              the table
rows_*           its rows: arithmetic, functions and logic, which Triton spells; composed, special and activations, which other rows do;
                 and runs, which position_runs makes
ranges           rules of its columns for ranges of numbers
interval_rules   rules of its column for intervals

Tracing

bind                                   from a mod to its graph: traced, or found again
trace                                  one trace of a mod
runs                                   a mod runs on symbols: on stand-ins for what it captures, or on the objects
current                                the run of this thread
symbols                                what a mod gets for score, b, h, q_idx and kv_idx
dispatch                               where every operation arrives
methods                                methods of symbols that are no operations
operators                              Python's operators
nodes                                  an operation becomes a node
vectors, vector_functions, long_dots   captured rows and small matrices, and dot products of long rows
vector_moves                           parts that an index names, views, stacks: what moves elements
vector_statistics                      functions of a vector as a whole
vector_dtypes                          in which dtypes these compute
lookups                                embeddings, places in sorted rows, sets of numbers

What it captures

capture      what is read, and how it is found again
program      the recorded steps and their guards
origins      where captured values come from, as Python
stand_ins    what a mod sees instead of what it captures
calls        calls of captured functions
audit        what no stand-in can see: a function's bytecode
purity       what of libraries may be called again
randomness   random numbers, which are refused
tensors      which tensors kernels can read
levels       what transforms of torch.func put around tensors
watched      what hooks of saved tensors and dispatch modes see

What follows from a graph

grad, tangent                derivatives: reverse mode and forward mode
nan                          where they may be NaN
index_range                  what integers may be
intervals, bounds            what is sure of a whole block of a mask
position_runs                masks as runs of positions
decisions                    products are rounded where something is decided by their sums
sums, distance, added_dots   score_mods that add a number, read by distance, or add a dot product
"""
