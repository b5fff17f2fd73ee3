"""One self-contained HTML page of results: leaderboard, trade-offs, pictures side by side, maps, audits, provenance."""
