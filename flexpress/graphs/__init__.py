"""Public functions in graphs of torch: what its compiler, its exporter and its counters see of a call.

in_graph, dynamo        public functions in what torch.compile traces
bound_mods, programs    mods bound there, and a call as text
custom_ops              how operators are made: lists that may be empty, and fakes
"""
