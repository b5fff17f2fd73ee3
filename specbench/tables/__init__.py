"""The papers' tables: measured rows next to published numbers, as Markdown, LaTeX and CSV. Missing rows are
measured."""
