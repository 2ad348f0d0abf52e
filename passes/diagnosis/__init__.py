"""What `explain` says beside matches: bugs of exporters, and regions that no rule matches."""

from gradfuse.passes.diagnosis.exporter_bugs import FindExporterBugsPass
from gradfuse.passes.diagnosis.gradients import CONTRACTIONS
from gradfuse.passes.diagnosis.unmatched import FindUnmatchedPass

__all__ = [
    "CONTRACTIONS",
    "FindExporterBugsPass",
    "FindUnmatchedPass",
]
