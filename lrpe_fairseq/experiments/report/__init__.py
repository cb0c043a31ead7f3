"""Cells, tables, curves, pictures and generated pages, from run files."""
