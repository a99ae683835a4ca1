"""COMPARE METHODS: grids of runs, the store of their records, statistics, tables and figures. Selects no units itself."""
