"""Files: their locations, downloads, and safe writing."""
