"""From the nodes of a graph to the canonical forms of its values."""
