"""Look: one page about a prune or about a store, and the map of a model in it and in a notebook."""
