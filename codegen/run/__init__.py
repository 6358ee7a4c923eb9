"""A call's tensors become a plan, arguments and outputs."""
