"""WHICH UNITS? Policies, the loop that lets them choose, and the meter that measures damage. Knows nothing of cutting."""
