"""The papers' tables: measured rows beside published numbers, run where missing, drawn as Markdown, LaTeX and CSV."""
