"""What a mod gets for score, b, h, q_idx and kv_idx, and how an operation on it becomes a node.

symbols     what a mod gets
dispatch    where every operation arrives
methods     methods of symbols that are no operations
nodes       an operation becomes a node
integers    how large integers of a mod may be
graph_mod   a graph in place of a function

vectors, vector_functions, long_dots   captured rows and small matrices, and dot products of long rows
vector_moves                           parts that an index names, views, stacks: what moves elements
vector_statistics                      functions of a vector as a whole
vector_dtypes                          in which dtypes these compute
lookups                                embeddings, places in sorted rows, sets of numbers
"""
