"""The workshop, installed as `flexpress.codegen`. A folder is a stage, and imports only those below it:

export   kernels become a file of their own
run      drivers: from a call's tensors to a plan, arguments and outputs
device   cache on disk, compile, load, launch, interpreter
plan     which kernel and tile a call gets, from structure alone
text     from an expression graph to a kernel's text
mod      what a user's function means: a graph, and the values that it captures

The files beside the folders are the ground, which imports none of them. docs/design.md shows the way of a call.
"""

if __name__ != "flexpress.codegen":
    raise ImportError("this folder is the package flexpress.codegen; import it by that name (pip install -e . sets it up)")
