"""What a run shows: pure functions of its ledger, metrics and manifests."""
