"""Files: where they lie, how they are fetched, how they are written."""
