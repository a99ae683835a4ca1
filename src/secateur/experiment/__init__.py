"""Grids of runs, their records, and the statistics, tables and figures that fall out of them."""
