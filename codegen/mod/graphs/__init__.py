"""What follows from a graph: derivatives, bounds, texts, other graphs.

known        equal graphs are one object
loads        what a mod loads
compute      expressions computed with torch
graph_text   graphs as texts

grad, tangent   derivatives: reverse mode and forward mode
nan             where they may be NaN

index_range                  what integers may be
intervals, bounds            what is sure of a whole block of a mask
position_runs                masks as runs of positions
decisions                    products are rounded where something is decided by their sums
sums, distance, added_dots   score_mods that add a number, read by distance, or add a dot product

rewriting   nodes that are made of a graph's
folded      mods of many calls as one
scaled      a score_mod times one more captured tensor
wide        arithmetic of indices that leaves int32
"""
