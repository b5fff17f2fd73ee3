"""One run: its folder, its processes, its images and its row."""
