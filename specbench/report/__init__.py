"""One self-contained HTML page of results: leaderboard, trade-offs, images side by side, maps, audits, provenance."""
