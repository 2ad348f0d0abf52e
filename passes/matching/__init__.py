"""From canonical forms to fused nodes: the search, the builder and the passes."""
