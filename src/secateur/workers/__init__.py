"""WHO DOES IT? Threads of this process, other processes, or a Ray cluster."""
