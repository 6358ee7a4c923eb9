"""From an expression to the text of a kernel. Each module imports from those above it:

code            an expression as a kernel spells it, and a statement
lines           text of the user's that a kernel shows in comments
parsing         reading Python: prints and users' lines
parameters      a kernel's arguments as data
language        what a language of kernels offers
spelling        expressions in Python's syntax, with as few parentheses as a reader wants
languages       Triton and Gluon
layouts         what a kernel's text knows of how captured tensors lie in memory
cpp             C++
snippet         what lowering takes and gives
expressions     expressions of a mod as code
addresses       loads of captured tensors
long_dots       dot products of long rows of captured tensors
lower           a traced mod becomes statements
stages          statements by when they can run
gradient_text   what backward kernels take of a score_mod
mod_text        a lowered mod as templates and launches see it
spec            all that changes the text of a kernel
template_code   compiled templates on disk
render          a spec becomes that text
"""
