"""What a user's function means: traced, with what it captures, as an expression; its derivative, its bounds.

A folder imports only those above it, and the files of this one are below all of them.

captured/   what a mod captures, and what it sees in its place
table/      the op table: what operations mean, and what is known of them
symbolic/   what a mod gets for score, b, h, q_idx and kv_idx, and how an operation on it becomes a node
graphs/     what follows from a graph: derivatives, bounds, texts, other graphs
tracing/    from a mod to its graph, traced or found again

expr        nodes, graphs, and what they capture
current     the run of this thread
errors      what goes wrong
operators   Python's operators
"""
