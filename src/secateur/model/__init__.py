"""WHAT IS IT? A model: where its units are, how it is loaded, run, zeroed and counted. Knows nothing about search and cuts."""
