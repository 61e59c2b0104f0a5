"""Reports: pure functions of a run's ledger, metrics and manifests."""
