"""What `explain` says beside matches: bugs of exporters, and regions that no rule matches."""
