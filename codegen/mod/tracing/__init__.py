"""From a mod to its graph, traced or found again.

bind      a mod, its graph and what it captures at this call
trace     one trace of a mod
runs      a mod runs on symbols: on stand-ins for what it captures, or on the objects
capture   what is read, and how it is found again
calls     calls of captured functions
"""
