"""The papers' tables: measured rows next to published numbers, run where missing, as Markdown, LaTeX and CSV."""
