"""THE COMMAND LINE: each command parses, calls one function of the library, and shows the result."""
