"""What `explain` says beside matches: bugs of exporters, and regions that no rule matches."""

from gradfuse.passes.diagnosis.exporter_bugs import FindExporterBugsPass
from gradfuse.passes.diagnosis.unmatched import CONTRACTIONS, FindUnmatchedPass

__all__ = [
    "CONTRACTIONS",
    "FindExporterBugsPass",
    "FindUnmatchedPass",
]
