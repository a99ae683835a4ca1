"""WHAT IS IT WORTH? Evaluation, speed, memory, and the benchmark of the search. Changes no model."""
