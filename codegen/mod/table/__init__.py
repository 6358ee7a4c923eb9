"""The op table: what operations mean, and what is known of them.

op               what a row says
ops              the table
rows_*           its rows: arithmetic, functions and logic, which Triton spells; composed, special and activations, which other rows do;
                 and runs, which position_runs makes
ranges           rules of its columns for ranges of numbers
interval_rules   rules of its column for intervals
dtypes           in which dtype an operation computes
"""
