"""From an expression to the text of a kernel."""
