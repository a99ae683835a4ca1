"""THE DATA: texts and images as batches, and the check that calibration and evaluation data differ. Knows no units."""
