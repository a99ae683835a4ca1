"""OTHERS' RULES: what other tools choose by, our implementation from their papers on our units and batches."""
