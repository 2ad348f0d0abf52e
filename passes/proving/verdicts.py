"""What the test by numbers finds against a rewrite."""


class Refuted(Exception):
    """The fused op computed something else than the subgraph that it was to replace."""


class Unproved(Exception):
    """The subgraph could not be run, gave nothing that could be compared, or no number where the fused op gives one."""
